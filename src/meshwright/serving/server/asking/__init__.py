"""What clients ask: bodies of requests, checked field by field."""

from meshwright.serving.server.asking.bodies import Ask, read_chat, read_completion
from meshwright.serving.server.asking.prompts import Prompt, tokenise

__all__ = ["Ask", "Prompt", "read_chat", "read_completion", "tokenise"]
