"""How a server is reached, and how much a client may send it."""

from dataclasses import dataclass, field

from meshwright.errors import ServingError

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class ServerSettings:
    """The settings of one server.

    Attributes:
        name: The model's name, as clients write it.
        host: The address to listen at; the loopback, which only this machine reaches, by default.
        port: The port; 0 takes a free one.
        api_key: What clients must send as `Authorization: Bearer KEY`; "" lets everybody in.
        body_bytes: The largest body of a request.
        body_s: How long a client may take to send it.
        most_choices: The most texts that one request may ask for, `n` of each prompt.
        drain_s: How long open requests may take to end after SIGTERM.
    """

    name: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str = field(default="", repr=False)
    body_bytes: int = 16 * 2**20
    body_s: float = 60.0
    most_choices: int = 128
    drain_s: float = 30.0

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ServingError(f"port is {self.port}; give one between 0 and 65535")
        for name in ("body_bytes", "body_s", "most_choices"):
            if getattr(self, name) <= 0:
                raise ServingError(f"{name} is {getattr(self, name)}; give more than 0")
        if self.drain_s < 0:
            raise ServingError(f"drain_s is {self.drain_s}; give 0 or more")
        if not self.api_key.isascii() or any(mark.isspace() for mark in self.api_key):
            raise ServingError(
                "the API key has spaces or letters beyond ASCII, which a header cannot carry; give another"
            )
