"""Supervision of a run: restarts of its process, and a watchdog for hangs and slow hosts."""
