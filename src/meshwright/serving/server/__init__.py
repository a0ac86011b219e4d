"""The server: a model behind OpenAI's interface, with the engine in a process of its own."""

try:
    import jinja2  # noqa: F401
    import prometheus_client  # noqa: F401
    import starlette  # noqa: F401
    import tokenizers  # noqa: F401
    import uvicorn  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"meshwright serve needs {error.name}, which is not installed: pip install 'meshwright[serve]'"
    ) from error

from meshwright.serving.server.messages import Recipe
from meshwright.serving.server.run import serve
from meshwright.serving.server.settings import ServerSettings

__all__ = ["Recipe", "ServerSettings", "serve"]
