"""Now deepspeed_cdp.cli.convert; checkpoints that were saved before hold a script that imports this."""

import sys

from deepspeed_cdp.cli.convert import get_fp32_state_dict_from_zero_checkpoint, main

__all__ = ["get_fp32_state_dict_from_zero_checkpoint", "main"]

if __name__ == "__main__":
    sys.exit(main())
