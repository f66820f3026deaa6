"""Whether the processes of a group train the same: the same run, the same parameters, from the same values."""

from dataclasses import fields
from itertools import zip_longest

import torch

from edgc.comm.objects import ProcessGroup, all_gather_objects, process
from edgc.comm.replicas import digest
from edgc.config import ConfigError, EDGCConfig, Job, flag
from edgc.hosts.module_parameters import ModuleParameters
from edgc.observe.events import EventLog

JOB_SETTINGS = tuple(one.name for one in fields(Job))  # may differ between processes, and between a run and its resume


def check_run(config: EDGCConfig, iterations: int, parameters: ModuleParameters, group: ProcessGroup | None) -> None:
    """Raise ``ConfigError`` on all processes where the event log cannot be written, and where processes have other
    settings, iterations or parameters. Every process of the group calls this.
    """
    settings = {flag(name): value for name, value in config.flat().items() if name not in JOB_SETTINGS}
    settings["iterations"] = iterations
    everyone = all_gather_objects((_log_problem(config, group), settings, parameters.signatures()), group)
    for problem, _, _ in everyone:
        if problem:
            raise ConfigError(problem)
    _, first_settings, first_signatures = everyone[0]
    for number, (_, settings, signatures) in enumerate(everyone):
        for name, first in first_settings.items():
            if settings[name] != first:
                raise ConfigError(f"{name} = {settings[name]} on process {number} of the group, {first} on process 0")
        for one, other in zip_longest(signatures, first_signatures, fillvalue="nothing"):
            if one != other:
                raise ConfigError(
                    f"process {number} of the group trains {one} where process 0 trains {other}: EDGC averages the "
                    "same parameters on all processes"
                )


def check_values(parameters: ModuleParameters, group: ProcessGroup | None) -> None:
    """Raise ``ConfigError`` on all processes where a parameter that they train has other values on one of them. Every
    process of the group calls this.
    """
    own = torch.stack([digest(parameter) for parameter in parameters.names]).tolist()
    first, *others = all_gather_objects(own, group)
    for number, digests in enumerate(others, 1):
        for name, one, other in zip(parameters.names.values(), digests, first, strict=True):
            if one != other:
                raise ConfigError(
                    f"{name} has other values on process {number} of the group than on process 0: averaged gradients "
                    "keep parameters equal only if they start equal. Give all processes the same weights, or wrap the "
                    "module in DistributedDataParallel, which sends them those of process 0"
                )


def _log_problem(config: EDGCConfig, group: ProcessGroup | None) -> str:
    """Why the event log cannot be written, if it cannot."""
    try:
        EventLog(config.job.log_dir if process(group) == 0 else None).close()
    except ConfigError as error:
        return str(error)
    return ""
