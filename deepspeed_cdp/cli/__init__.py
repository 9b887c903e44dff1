"""The ``deepspeed-cdp`` command: one file per subcommand, put together in main.py."""
