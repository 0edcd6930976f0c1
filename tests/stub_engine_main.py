"""The program of stub_engine.StubServer: python stub_engine_main.py PORT; its folder of temporary
files is TMPDIR."""

import asyncio
import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

from vapo_megatron.engines.inside.heartbeat import END_PATH, Heartbeat, register

PROTOCOL = int(os.environ.get("STUB_PROTOCOL", "0"))


def end_with(parent: int) -> None:
    """As an engine's guard sees to it."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(0, signal.SIGKILL)


def main(port: int) -> None:
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    if os.fork() == 0:
        register("scheduler")
        while True:
            signal.pause()
    heartbeat = Heartbeat(lambda: [])

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            told = asyncio.run(heartbeat.health()) | {"protocol": PROTOCOL, "agreed": {}}
            self.wfile.write(json.dumps(told).encode())

        def do_POST(self) -> None:
            if self.path == f"/{END_PATH}?cause=a+test":
                asyncio.run(heartbeat.end("a test"))
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: object) -> None: ...

    time.sleep(0.2)
    HTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]))
