"""The command ``deepspeed-cdp``. Imports anything; nothing imports it."""
