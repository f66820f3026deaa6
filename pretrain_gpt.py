"""Pretrain a GPT on Megatron-core, with ``--edgc`` under gradient compression.

Takes the command line of Megatron-LM's script of this name plus the ``--edgc-*`` flags; start it with torchrun.
"""

import os
import sys

from edgc.config import ConfigError
from megatron.edgc import cpu


def main() -> int:
    on_cpu = cpu.wanted(sys.argv)
    if on_cpu:
        cpu.redirect()
    from megatron.edgc.pretrain import pretrain_gpt  # imports Megatron, which must see the redirection

    try:
        pretrain_gpt(on_cpu)
    except ConfigError as error:
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"edgc: error: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
