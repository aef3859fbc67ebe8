"""Search for a layout: enumerate, predict in microseconds, compile the most promising, correct the predictions."""
