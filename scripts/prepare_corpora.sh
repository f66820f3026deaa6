#!/usr/bin/env bash
# Make the corpora of configs/frontier/general.yaml under runs/data:  bash scripts/prepare_corpora.sh
# Python: the standard library of the environment's interpreter. English: the documentation of the Linux kernel. Go: a part
# of its standard library. The last two are Debian packages, 56 MB, which apt-get fetches without being root. What exists
# is kept. Takes about eight minutes.
set -euo pipefail

case "$*" in
    '') ;;
    -h | --help) exec sed -n '2,/^set/ { s/^# \{0,1\}//p }' -- "${BASH_SOURCE[0]}" ;;
    *) printf 'prepare_corpora: error: %s: only --help is known\n' "$*" >&2 && exit 2 ;;
esac
cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/.."
bash scripts/setup_env.sh

texts=runs/data/texts
fetch() { # package, and a folder that shows that it has been unpacked
    if [[ -d $texts/$2 ]]; then
        return
    fi
    if ! command -v apt-get >/dev/null || ! command -v dpkg-deb >/dev/null; then
        echo "prepare_corpora.sh: error: the corpus $2 needs apt-get and dpkg-deb, of Debian or Ubuntu" >&2
        exit 2
    fi
    [[ -n $1 ]] || {
        echo "prepare_corpora.sh: error: this system's package lists have no source of the corpus $2; apt-get update?" >&2
        exit 2
    }
    local folder # on the file system of the corpora, so that mv moves all or nothing
    mkdir -p "$texts"
    folder=$(mktemp -d -p "$texts")
    echo "fetching $1 from the archive of this system"
    (cd "$folder" && apt-get download --quiet --quiet "$1")
    dpkg-deb --extract "$folder"/*.deb "$folder/unpacked"
    mkdir -p "$(dirname "$texts/$2")"
    mv -T "$(find "$folder/unpacked" -type d -path "*/$3" | head -n 1)" "$texts/$2"
    rm -r "$folder"
}

prepare() { # name, vocabulary, source
    local name=$1 vocabulary=$2
    shift 2
    .venv/bin/python tools/preprocess_data.py "$@" --train-sentencepiece "$vocabulary" --validation-fraction 0.05 \
        --output-prefix "runs/data/$name$vocabulary"
}

english=(--input $texts/english --glob '*.txt')
go=(--input $texts/go/{net,crypto,encoding,go,text,html,image,os} --glob '*.go')
prepare python 512 --python-stdlib
prepare python 2048 --python-stdlib
prepare python 8192 --python-stdlib
package=$(apt-cache depends --important linux-doc 2>/dev/null | sed -n 's/.*Depends: //p' | head -n 1) || true
fetch "$package" english html/_sources
rm -rf $texts/english/translations
package=$(apt-cache pkgnames golang 2>/dev/null | grep -E '^golang-1\.[0-9]+-src$' | sort -V | tail -n 1) || true
fetch "$package" go share/go-1.*/src
prepare english 2048 "${english[@]}"
prepare english 8192 "${english[@]}"
prepare english 50257 "${english[@]}"
prepare go 512 "${go[@]}"
prepare go 8192 "${go[@]}"
