"""Know before you pay: compile for any topology without the hardware, read the compiled program, price it, search layouts."""
