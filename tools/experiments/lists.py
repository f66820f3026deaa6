"""Lists of runs, as YAML files describe them."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from edgc.config import EDGCConfig
from tools._root import REPOSITORY
from tools.experiments.entries import setting
from tools.experiments.studies import STUDIES
from tools.shared.megatron import corpus_flags, data_path

RUNS = REPOSITORY / "runs" / "frontier"
ENTRY_KEYS = {"name", "model", "data_parallel", "pipeline_parallel", "iterations", "seeds", "flags", "gone"}
LIST_KEYS = {"title", "study", "studies", "corpus", "flags", "models", "defaults", "entries", "comparisons", "trends"}


class ListError(Exception):
    """A list of runs that breaks a rule; the message names the file, the entry and the rule."""


@dataclass(frozen=True)
class Trial:
    """One training run: an entry of a list under one seed."""

    name: str
    model: str
    data_parallel: int
    pipeline_parallel: int
    iterations: int
    seed: int
    flags: tuple[str, ...]
    settings: tuple[str, ...]  # what all entries share: model, corpus, optimiser
    corpus: str  # prefix of its files
    gpu: bool = False  # on the CPU otherwise
    gone: str = ""  # why today's code cannot run it any more; its lines stay on the page

    @property
    def setting(self) -> str:
        """What runs must have in common to be compared."""
        on = "-gpu" if self.gpu else ""
        return f"{self.model}-dp{self.data_parallel}-pp{self.pipeline_parallel}-{self.iterations}{on}"

    @property
    def folder(self) -> Path:
        return RUNS / self.setting / f"{self.name}-seed{self.seed}"

    @property
    def engine(self) -> str:
        given = [value for flag, value in pairwise((*self.settings, *self.flags)) if flag == "--edgc-engine"]
        return given[-1].partition(":")[0] if given else EDGCConfig.engine

    def arguments(self) -> list[str]:
        """Everything after ``pretrain_gpt.py``, with paths relative to the repository."""
        folder = self.folder.relative_to(REPOSITORY)
        own = f"--train-iters {self.iterations} --seed {self.seed}"
        if self.pipeline_parallel > 1:
            own += f" --pipeline-model-parallel-size {self.pipeline_parallel}"
        logs = f"--tensorboard-dir {folder}/tensorboard --edgc --edgc-log-dir {folder} --edgc-seed {self.seed}"
        device = [] if self.gpu else ["--edgc-cpu"]
        return [*device, *self.settings, *own.split(), *logs.split(), *self.flags]


@dataclass(frozen=True)
class RunList:
    """A list of runs, the pairs of entries to set side by side, and the study that it is, if any.

    ``studies``: those that have a page beside the list's own. ``trends``: what to draw the gap against, by its name; of
    each the values, by setting.
    """

    name: str
    title: str
    trials: tuple[Trial, ...]
    comparisons: tuple[tuple[str, str], ...]
    study: str | None = None
    studies: tuple[str, ...] = ()
    trends: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


def load_list(path: Path, gpu: bool = False) -> RunList:
    """Read a list of runs, to be trained on GPUs or on the CPU. Raises ``ListError`` for one that is incomplete or
    misspelt.
    """
    try:
        return _list_of(path, yaml.safe_load(path.read_text(encoding="utf-8")), gpu)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ListError(f"{path}: {error}") from error
    except (AttributeError, TypeError, ValueError) as error:  # a value of another kind than the format has
        raise ListError(f"{path}: does not have the format of docs/frontier/lists.md: {error}") from error


def _list_of(path: Path, content: Any, gpu: bool) -> RunList:
    if not isinstance(content, dict) or set(content) - LIST_KEYS or not {"models", "entries"} <= set(content):
        raise ListError(f"{path}: needs models and entries, may have {', '.join(sorted(LIST_KEYS))}, and nothing else")
    trials = []
    for entry in content["entries"]:
        entry = {"gone": "", **content.get("defaults", {}), **entry}
        where = f"{path}, entry {entry.get('name', '?')}"
        if set(entry) != ENTRY_KEYS:
            wrong = sorted(set(entry) ^ ENTRY_KEYS)
            raise ListError(f"{where}: missing or unknown: {', '.join(wrong)}")
        for key in ("name", "model"):  # they name folders and stand in command lines
            if not re.fullmatch(r"[\w.%+-]+", str(entry[key])):
                raise ListError(f"{where}: {key} = {entry[key]!r}: only letters, digits and ._%+- are allowed")
        if entry["model"] not in content["models"]:
            raise ListError(f"{where}: there is no model {entry['model']}")
        model: Any = content["models"][entry["model"]]
        if isinstance(model, str):
            model = {"flags": model}
        if not isinstance(model, dict) or set(model) - {"flags", "corpus"} or "flags" not in model:
            raise ListError(f"{path}, model {entry['model']}: needs flags, or a mapping with flags and perhaps corpus")
        for key in ("data_parallel", "pipeline_parallel", "iterations"):
            if type(entry[key]) is not int or entry[key] < 1:
                raise ListError(f"{where}: {key} = {entry[key]!r}: must be an integer of 1 or more")
        corpus = model.get("corpus") or content.get("corpus") or "runs/data/stdlib"
        data = shlex.join(corpus_flags(corpus))
        shared = " ".join((content.get("flags", ""), model["flags"], data))
        for seed in entry["seeds"]:
            trials.append(
                Trial(
                    name=entry["name"],
                    model=entry["model"],
                    data_parallel=entry["data_parallel"],
                    pipeline_parallel=entry["pipeline_parallel"],
                    iterations=entry["iterations"],
                    seed=seed,
                    flags=tuple(shlex.split(entry["flags"])),
                    settings=tuple(shlex.split(shared, comments=True)),
                    corpus=corpus,
                    gpu=gpu,
                    gone=entry["gone"],
                )
            )
    folders = [trial.folder for trial in trials]
    if twice := sorted({folder.name for folder in folders if folders.count(folder) > 1}):
        raise ListError(f"{path}: listed twice: {', '.join(twice)}")
    comparisons = tuple((first, second) for first, second in content.get("comparisons", []))
    names = {trial.name for trial in trials}
    if unknown := sorted({name for pair in comparisons for name in pair} - names):
        raise ListError(f"{path}: compared but not listed: {', '.join(unknown)}")
    study, studies = content.get("study"), tuple(content.get("studies", []))
    for one in (*studies, *([] if study is None else [study])):
        if one not in STUDIES:
            raise ListError(f"{path}: study = {one}: must be one of {', '.join(STUDIES)}")
    trends = content.get("trends", {})
    if unknown := sorted(
        {where for values in trends.values() for where in values} - {setting(vars(t)) for t in trials}
    ):
        raise ListError(f"{path}: trends name what is not listed: {'; '.join(unknown)}")
    return RunList(path.stem, content.get("title", path.stem), tuple(trials), comparisons, study, studies, trends)


def missing_corpora(trials: Sequence[Trial]) -> list[str]:
    """The corpora of these trials whose data is not there."""
    corpora = dict.fromkeys(trial.corpus for trial in trials)
    return [one for one in corpora if not (REPOSITORY / f"{data_path(one, 'train')}.idx").is_file()]


def how_made(corpus: str) -> str:
    """The command that makes a corpus."""
    if re.fullmatch(r"runs/data/(python|english|go)\d+", corpus):
        return "bash scripts/prepare_corpora.sh"
    pieces = re.fullmatch(r"runs/data/stdlib(\d*)", corpus)
    source = "--python-stdlib" if pieces else "--input FILES"
    vocabulary = (pieces and pieces[1]) or "512"
    return (
        f"python tools/preprocess_data.py {source} --train-sentencepiece {vocabulary} --validation-fraction 0.05 "
        f"--output-prefix {shlex.quote(corpus)}"
    )
