"""Pretrain a GPT on Megatron-core, with ``--edgc`` under gradient compression.

Takes the command line of Megatron-LM's script of this name plus the ``--edgc-*`` flags; start it with torchrun.
"""

import os
import sys
import time

from edgc.config import ConfigError
from edgc.errors import StepError
from megatron.edgc.compatibility import check_megatron
from megatron.edgc.recipes import cpu

LAUNCHER_SECONDS = 10  # after which a launcher has ended the other processes of a node, if one has failed


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
        _say_once_on_a_node(error)
        return 2
    except StepError as error:  # by every process that sees it: rank 0 need not be one
        print(f"edgc: error: process {os.environ.get('RANK', '0')}: {error}", file=sys.stderr, flush=True)
        return 3
    return 0


def _say_once_on_a_node(error: ConfigError) -> None:
    """Print it, by every node, as one alone may have the fault. Where the node's first process has it too, that one
    prints it, and the launcher ends the others before they do.
    """
    place = ""
    if int(os.environ.get("LOCAL_RANK", "0")):
        time.sleep(LAUNCHER_SECONDS)
        place = f"process {os.environ.get('RANK', '?')}: "
    print(f"edgc: error: {place}{error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
