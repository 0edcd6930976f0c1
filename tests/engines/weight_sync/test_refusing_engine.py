"""Two engines of one broadcast, of which one refuses in the middle of a weight sync."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch

from vapo_megatron.engines.inside.broadcast_group import BroadcastGroup
from vapo_megatron.engines.server.address import EngineAddress
from vapo_megatron.engines.server.client import EngineClient
from vapo_megatron.engines.weight_sync.broadcast_transport import DistributedTransport
from vapo_megatron.engines.weight_sync.session import EngineLost, WeightSync
from vapo_megatron.weights.bucket import buffer_of, places_of, sums_of_places, view

DEADLINE = 120.0
SOON = 30.0  # a test that waited for a deadline would take longer
CPU = torch.device("cpu")


class Receiver:
    """The engine's side of a weight sync by broadcast, and the weights that it was sent.

    refuses: the number of the bucket, from 1, that it answers with 400 and does not receive.
    """

    def __init__(self, refuses: int | None = None) -> None:
        self.refuses = refuses
        self.weights: dict[str, torch.Tensor] = {}
        self.buckets = 0
        self.group: BroadcastGroup | None = None
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, answer = receiver.answer(self.path.strip("/"), body)
                content = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = EngineAddress(f"http://127.0.0.1:{self.server.server_port}", "none.log")
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        if path == "init_weights_update_group":
            host, port, size = body["master_address"], body["master_port"], body["world_size"]
            store = BroadcastGroup.connect(host, port, size, DEADLINE)
            rank = body["rank_offset"]
            self.group = BroadcastGroup(store, rank, size, DEADLINE, host, CPU)
        if path != "update_weights_from_distributed":
            return 200, {}
        message = json.loads(body["load_format"].partition(":")[2])
        checksums = []
        if message["size"]:
            self.buckets += 1
            if self.buckets == self.refuses:
                return 400, {"error": {"message": "it is shutting down"}}
            assert self.group is not None
            buffer = torch.empty(message["size"], dtype=torch.uint8)
            self.group.broadcast(buffer)
            received = buffer_of(message, buffer)
            tensors = [(place.name, view(received, place)) for place in places_of(message)]
            checksums = sums_of_places(received, places_of(message))
            self.weights |= {name: tensor.clone() for name, tensor in tensors}
        told = {"problems": [], "seconds": 0.0, "checksums": [checksums]}
        return 200, {"success": True, "message": json.dumps(told)}


@pytest.fixture
def engines() -> Iterator[tuple[Receiver, Receiver]]:
    both = Receiver(), Receiver(refuses=2)
    yield both
    for engine in both:
        engine.group = None  # its connections close, which ends the broadcast that nobody waits for
    for thread in threading.enumerate():
        if thread.name == "vapo-broadcast":
            thread.join(DEADLINE)
    for engine in both:
        engine.server.shutdown()
        engine.server.server_close()


def buckets_of(value: float) -> list[list[tuple[str, torch.Tensor]]]:
    return [[(f"weight{number}", torch.full((64,), value + number))] for number in range(4)]


def test_an_engine_that_refuses_is_named_and_the_other_serves_on(
    engines: tuple[Receiver, Receiver],
) -> None:
    serves, refuses = engines
    clients = [EngineClient(engine.address, DEADLINE) for engine in engines]
    iterated = []
    with WeightSync(DistributedTransport(clients, 1, DEADLINE)) as sync:
        sync.serve({engine.address.url: 1 for engine in engines})
        start = time.monotonic()
        refusal = r"was refused \(HTTP 400\): it is shutting down"
        with pytest.raises(EngineLost, match=refusal) as end:
            sync.load((iterated.append(bucket) or bucket for bucket in buckets_of(1.0)), version=1)
        assert refuses.address.url in str(end.value)
        assert len(iterated) == 4, "other ranks wait in the collectives that make them"
        sync.serve({serves.address.url: 1})
        sync.load(buckets_of(5.0), version=2)
        assert time.monotonic() - start < SOON
    found = {name: tensor.unique().tolist() for name, tensor in serves.weights.items()}
    assert found == {f"weight{number}": [5.0 + number] for number in range(4)}
    assert refuses.weights["weight0"].unique().tolist() == [1.0] and refuses.buckets == 2
