#!/usr/bin/env bash
# Create or reuse .venv at the repository root, with the versions pinned in constraints.txt.
#
#     bash scripts/setup_env.sh          afterwards: .venv/bin/python
#
# EDGC_PYTHON=/path/to/python chooses the interpreter. Once .venv is complete a further run installs nothing.
set -euo pipefail

root=$(dirname -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")")
venv=$root/.venv
python=$venv/bin/python
log=$venv/install.log
stamp=$venv/edgc.stamp # written last, so half an installation never passes for a whole one

say() { printf 'setup_env: %s\n' "$*"; }
die() {
    printf 'setup_env: %s\n' "$*" >&2
    exit 1
}

(($# == 0)) || die "error: $*: takes no arguments; it makes .venv beside scripts/, EDGC_PYTHON=PATH names the interpreter"

# Print the real path of the interpreter $1; fail unless it runs (a pyenv shim may exist and not run), has wheels of
# Megatron-core and can make a virtual environment.
supported() {
    "$1" -I - 2>/dev/null <<'PYTHON'
import ensurepip, os, sys, venv
if sys.version_info[:2] not in ((3, 12), (3, 13)):
    sys.exit(1)
print(os.path.realpath(sys.executable))
PYTHON
}

# The interpreters that pyenv has installed, whether or not one of them is selected: 3.12 first, newest first.
pyenv_pythons() {
    local folder version
    for folder in "${PYENV_ROOT:-${HOME:-}/.pyenv}" "$(pyenv root 2>/dev/null)"; do
        for version in 3.12 3.13; do
            printf '%s\n' "$folder/versions/$version"*/bin/python | sort --reverse --version-sort
        done
    done
}

find_python() {
    local candidate candidates
    if [[ -n ${EDGC_PYTHON:-} ]]; then
        supported "$EDGC_PYTHON" || die "EDGC_PYTHON=$EDGC_PYTHON is not a working Python 3.12 or 3.13 with venv and pip"
        return
    fi
    mapfile -t candidates < <(type -aP python3.12 python3.13 python3 python; pyenv_pythons)
    for candidate in "${candidates[@]}"; do
        supported "$candidate" && return
    done
    if command -v uv >/dev/null; then
        for candidate in 3.12 3.13; do
            supported "$(uv python find --system "$candidate" 2>/dev/null)" && return
        done
        uv python install --quiet 3.12 2>/dev/null && supported "$(uv python find --system 3.12)" && return
    fi
    die "no working Python 3.12 or 3.13 found: install one (python3.12 with python3.12-venv, 'pyenv install 3.12' or" \
        "'uv python install 3.12'), or name one in EDGC_PYTHON"
}

# .venv has a supported interpreter, and the one of EDGC_PYTHON if that is set.
venv_runs() {
    local interpreter
    interpreter=$(supported "$python") || return
    [[ -z ${EDGC_PYTHON:-} || $(supported "$EDGC_PYTHON") == "$interpreter" ]]
}

# A hash of all that decides what .venv must hold. The folder counts too: an editable install names it.
fingerprint() {
    { "$python" --version && echo "$root" && cat -- "$root"/{pyproject.toml,constraints.txt}; } | sha256sum
}

complete() { [[ -f $stamp ]] && venv_runs && [[ $(fingerprint) == "$(<"$stamp")" ]]; }

if complete; then
    exit
fi

# Of several concurrent runs one installs and the others wait for it. The lock lies outside .venv, which may be cleared.
exec 9>"$venv.lock"
if ! flock --nonblock 9; then
    say "waiting for another setup_env.sh"
    flock 9
fi
if complete; then
    exit
fi

if ! venv_runs || ! "$python" -m pip --version &>/dev/null; then
    base=$(find_python)
    say "creating .venv with $("$base" --version), $base"
    "$base" -m venv --clear "$venv"
fi
rm -f -- "$stamp"
wanted=$(fingerprint)
say "installing the versions in constraints.txt (torch brings several GB of CUDA libraries); log: .venv/install.log"
# PIP_CONSTRAINT, which NGC images set, describes the image's own packages and not those of this environment.
if ! (cd -- "$root" && env -u PIP_CONSTRAINT "$python" -m pip install --no-input --disable-pip-version-check \
    --progress-bar off -c constraints.txt -e '.[megatron,data,report,evaluate,test,docs]') </dev/null &>"$log"; then
    tail -n 20 -- "$log" >&2
    die "pip failed; the lines above end its log, $log"
fi
printf '%s\n' "$wanted" >"$stamp"
say "ready after $SECONDS s"
