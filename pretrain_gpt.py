"""Pretrain a GPT on Megatron-core, with ``--edgc`` under gradient compression.

Takes the command line of Megatron-LM's script of this name plus the ``--edgc-*`` flags; start it with torchrun.
"""

import os
import sys

from edgc.config import ConfigError
from edgc.errors import StepError
from megatron.edgc.compatibility import check_megatron
from megatron.edgc.recipes import cpu


def main() -> int:
    on_cpu = cpu.FLAG in sys.argv
    if not on_cpu and not {"-h", "--help"} & set(sys.argv) and (why := cpu.missing_gpu()):
        print(f"edgc: error: {why}", file=sys.stderr, flush=True)  # by whichever rank it is
        return 2
    try:
        check_megatron()  # reads files; what follows imports Megatron, and fails where a name is gone
        if on_cpu:
            cpu.redirect()
        from megatron.edgc.recipes.pretrain import pretrain_gpt  # must see the redirection

        pretrain_gpt(on_cpu)
    except ConfigError as error:
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:  # by every node: one alone may have the fault
            print(f"edgc: error: {error}", file=sys.stderr, flush=True)
        return 2
    except StepError as error:  # by every process that sees it: rank 0 need not be one
        print(f"edgc: error: process {os.environ.get('RANK', '0')}: {error}", file=sys.stderr, flush=True)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
