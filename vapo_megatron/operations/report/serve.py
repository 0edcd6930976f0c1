"""The report of runs that go on, at an address of this machine alone."""

import json
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from vapo_megatron.errors import BadInput
from vapo_megatron.operations.report.report import content, page
from vapo_megatron.operations.report.runs import read_run

HOST = "127.0.0.1"


def make_server(directories: Sequence[Path], port: int) -> ThreadingHTTPServer:
    """A server of the page (/) and of what it shows (/data.json), read anew for every request; port 0: a free one.

    Raises BadInput where a run has nothing to report on yet, or the port is taken.
    """
    for directory in directories:
        read_run(directory)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # A page elsewhere may point a name of its own at this machine: only this machine's names are answered.
            if self.headers.get("Host", "").partition(":")[0] not in (HOST, "localhost"):
                self.send_error(403)
                return
            try:
                runs = [read_run(directory) for directory in directories]
            except (BadInput, OSError) as error:
                self.send_error(503, explain=str(error))
                return
            path = self.path.partition("?")[0]
            if path == "/":
                self._send(page(runs, live=True), "text/html")
            elif path == "/data.json":
                self._send(json.dumps(content(runs)), "application/json")
            else:
                self.send_error(404)

        def _send(self, text: str, kind: str) -> None:
            body = text.encode()
            self.send_response(200)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            with suppress(ConnectionError):  # the browser has left
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: a page that follows a run asks every few seconds."""

    try:
        return ThreadingHTTPServer((HOST, port), Handler)
    except OSError as error:
        raise BadInput(f"--port {port}: cannot be listened on ({error.strerror}); give another one") from error


def serve(directories: Sequence[Path], port: int) -> None:
    """Serve until Ctrl-C."""
    with make_server(directories, port) as server:
        print(f"http://{HOST}:{server.server_address[1]}/  (Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return
