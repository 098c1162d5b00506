"""The agent policy: whose turn it is, how long its KV is kept, who is next, and what is learned of it."""

from engine import moved_modules as _moved_modules  # an old path of ours works where only we are imported

_moved_modules.install()
