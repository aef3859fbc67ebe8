"""Commands that look at machines, links, data and profiles."""
