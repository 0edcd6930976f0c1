"""SGLang's own opinion on a server's arguments, without a server: python -m vapo_megatron.engine.check_arguments ARGS.

Ends with 0 where SGLang takes them, else with another code and the reason as the last line of standard error.
"""

import sys

from vapo_megatron.engine import cpu_shim

if __name__ == "__main__":
    cpu_shim.install()
    from sglang.srt.server_args import prepare_server_args

    prepare_server_args(sys.argv[1:])
