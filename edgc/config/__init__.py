"""Every setting of EDGC in frozen dataclasses: its meaning, unit, default and source. No torch."""

from edgc.config.edgc_config import EDGCConfig, Job, flag, setting_fields
from edgc.config.formats import FORMATS, Formats
from edgc.config.pipeline import Messages, Pipeline
from edgc.config.ranks import BY_ENTROPY, RankPolicy, Ranks
from edgc.config.setting import ConfigError
from edgc.config.study import ESTIMATORS, Study
from edgc.config.without_effect import NOT_BY_ENTROPY, OF_A_VOLUME, UNUSED_BY_VOLUME

__all__ = [
    "BY_ENTROPY",
    "ESTIMATORS",
    "FORMATS",
    "NOT_BY_ENTROPY",
    "OF_A_VOLUME",
    "UNUSED_BY_VOLUME",
    "ConfigError",
    "EDGCConfig",
    "Formats",
    "Job",
    "Messages",
    "Pipeline",
    "RankPolicy",
    "Ranks",
    "Study",
    "flag",
    "setting_fields",
]
