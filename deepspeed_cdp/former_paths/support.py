"""Now deepspeed_cdp.integration.support."""

from deepspeed_cdp.integration.support import as_markdown

__all__ = ["as_markdown"]

if __name__ == "__main__":
    print(as_markdown())
