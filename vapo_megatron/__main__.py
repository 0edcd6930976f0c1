"""`python -m vapo_megatron` is `vapo-megatron`."""

from vapo_megatron.cli import main

main()
