"""`python -m maxlm` is `maxlm`."""

from maxlm.cli import main

main()
