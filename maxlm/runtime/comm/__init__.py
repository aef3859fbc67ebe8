"""How fast devices and hosts talk to each other: `maxlm bench-comm`, and `maxlm doctor --cluster`."""
