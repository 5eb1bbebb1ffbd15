"""A page in the browser over the planner: choose a model and a machine, see what fits and how fast, watch runs.

surojax studio
surojax studio runs/tiny --port 8000

It serves this machine only (127.0.0.1), and only who knows the address that it prints, which holds a token. The browser
is started with a file of the user's own that leads there, since all users of a machine see the words of a command. It
reads models, configs and the runs that it was given; it writes nothing else and starts no run.
"""

import argparse
import contextlib
import html
import http.server
import json
import secrets
import socket
import sys
import tempfile
import threading
import traceback
import urllib.parse
import webbrowser
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from surojax.errors import ConfigError, ending, ends_with_code, refusing, short_exit_codes
from surojax.pages import runs as runs_page, studio_page
from surojax.planner import aot
from surojax.refused_early import RUN
from surojax.untrusted import check_there

HERE = "127.0.0.1"
REQUEST_S = 10.0  # for a request to arrive
SILENT_S = 30.0  # for the client to take a part of an answer
MOST_CONNECTIONS = 64
SECURITY = {  # pages hold their own styles and scripts, and ask nobody else
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data:; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Server(http.server.ThreadingHTTPServer):
    """The local web server of the page at `address`. runs: folders of runs to watch. port: 0 takes a free port."""

    daemon_threads = True

    def __init__(self, runs: Sequence[str] = (), port: int = 0):
        super().__init__((HERE, port), Handler)
        self.runs = list(runs)
        self.token = secrets.token_urlsafe(16)
        self.places = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self.compiling = threading.Lock()  # a search or a compilation at a time: each takes all cores
        self.newest = object()  # stands for the last question about a plan
        self.answers = {"": self.page, "estimate": self.estimate, "fit": self.fit, "plan": self.plan, "run": self.run}

    @property
    def address(self) -> str:
        """The page's URL, with the token."""
        return f"http://{HERE}:{self.server_port}/{self.token}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Starts a thread for a connection; closes it if there are MOST_CONNECTIONS already."""
        if self.places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Handles a connection in its thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints an error's traceback, but nothing of a client that has left or is too slow."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    # Each takes the query of an address and returns (media type, text). Raises ConfigError.

    def page(self, query: dict[str, str]) -> tuple[str, str]:
        """Returns the page's HTML."""
        return "text/html", studio_page.page(self.runs)

    def estimate(self, query: dict[str, str]) -> tuple[str, str]:
        """Estimates memory and time, see `studio.estimate`."""
        return "application/json", json.dumps(studio_page.answer_estimate(studio_page.question(query)))

    def fit(self, query: dict[str, str]) -> tuple[str, str]:
        """Finds the fastest settings that fit, see `studio.fitting`."""
        with self.compiling:
            return "application/json", json.dumps(studio_page.fitting(studio_page.question(query)))

    def plan(self, query: dict[str, str]) -> tuple[str, str]:
        """Plans by compiling, see `studio.compiled`.

        If others are asked for before it begins, only the last one is compiled.
        """
        mine = self.newest = object()
        with self.compiling:
            if mine is not self.newest:
                raise ConfigError("another plan was asked for meanwhile")
            return "application/json", json.dumps(studio_page.compiled(studio_page.question(query)))

    def run(self, query: dict[str, str]) -> tuple[str, str]:
        """Returns the page of a run, by its number in `runs`."""
        number = query.get("number", "")
        if number not in map(str, range(len(self.runs))):
            raise ConfigError(f"run: expected the number of one of {len(self.runs)} runs, got {number!r}")
        name = self.runs[int(number)]
        return "text/html", runs_page.page([runs_page.read_run(name)], None, "", framed=True)


class Handler(http.server.BaseHTTPRequestHandler):
    """Handles a request to the server."""

    server: Server
    timeout = SILENT_S

    def handle(self) -> None:
        """Handles a connection, which is closed if its request has not arrived after REQUEST_S."""
        self.arrival = threading.Timer(REQUEST_S, self.close)
        self.arrival.daemon = True
        self.arrival.start()
        try:
            super().handle()
        finally:
            self.arrival.cancel()

    def close(self) -> None:
        """Closes the connection while another thread waits for it."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self) -> None:
        """Answers a request; 404 for requests without the token. A line of plain text says why there is no answer."""
        self.arrival.cancel()
        path, _, query = self.path.partition("?")
        _, token, *rest = [*path.split("/"), ""]
        name = "/".join(rest).strip("/")
        hosts = {f"{HERE}:{self.server.server_port}", f"localhost:{self.server.server_port}"}
        if (
            self.headers.get("Host") not in hosts  # another name that leads here (DNS rebinding)
            or not secrets.compare_digest(token.encode(), self.server.token.encode())
            or name not in self.server.answers
        ):
            self.send(404, "text/plain", "not found")
            return
        try:
            kind, text = self.server.answers[name](dict(urllib.parse.parse_qsl(query)))
        except (ConfigError, OSError) as error:
            self.send(200, "text/plain", " ".join(str(error).split()))
            return
        except Exception as error:  # of XLA's compiler, or a mistake of ours: the page stays
            traceback.print_exc()
            self.send(200, "text/plain", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
            return
        self.send(200, kind, text)

    def send(self, status: int, kind: str, text: str) -> None:
        """Sends a response."""
        body = text.encode()
        self.send_response(status)
        for name, value in {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": len(body), **SECURITY}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing, since the page shows errors."""


@contextlib.contextmanager
def leading_to(address: str) -> Iterator[str]:
    """Makes a page that leads a browser to an address; yields its URL. Only this user can read it."""
    with tempfile.TemporaryDirectory(prefix="surojax-studio-") as folder:
        file = Path(folder) / "studio.html"
        file.write_text(f'<!DOCTYPE html><meta http-equiv="refresh" content="0;url={html.escape(address)}">')
        yield file.as_uri()


def parser() -> argparse.ArgumentParser:
    """Makes the parser of the command's options."""
    arguments = argparse.ArgumentParser(prog="surojax studio", description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument(
        "runs", metavar="RUN", nargs="*", help="folders of runs, whose curves are shown as they grow"
    )
    arguments.add_argument("--port", metavar="N", type=int, default=0, help="of 127.0.0.1; a free one if left out")
    arguments.add_argument("--no-browser", action="store_true", help="only print the address")
    arguments.epilog = short_exit_codes()

    return refusing(arguments)


def main(argv: list[str] | None = None) -> None:
    """Parses the command line and serves until Ctrl-C. An error ends it with one line (`errors.ending`)."""
    jax.config.update("jax_platforms", "cpu")  # planning needs no GPU, and should not occupy one
    aot.silence()
    try:
        args = parser().parse_args(argv)
        for name in args.runs:
            check_there("RUN", name, RUN)
        if not 0 <= args.port < 2**16:
            raise ConfigError(f"--port: expected 0 to 65535, got {args.port}; leave it out")
        try:
            server = Server(args.runs, args.port)
        except OSError as error:
            raise ConfigError(f"--port: cannot use {args.port} ({error.strerror}); leave it out") from error
        with server, leading_to(server.address) as file:
            print(f"surojax studio: {server.address}\n  Ctrl-C ends it", flush=True)
            if not args.no_browser:
                webbrowser.open(file)
            server.serve_forever()
    except KeyboardInterrupt:
        print()
    except (ConfigError, OSError) as error:
        raise ending("studio", error) from error


if __name__ == "__main__":
    ends_with_code(main)
