"""A stand-in for the server of W&B on 127.0.0.1: it keeps what runs upload, and answers what the public API asks."""

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

VIEWER = {"id": "1", "entity": "lab", "username": "u", "email": "u@lab", "flags": "{}", "teams": {"edges": []}}


@dataclass
class StoredRun:
    """What one run uploaded."""

    name: str
    attributes: dict[str, Any]
    history: list[str] = field(default_factory=list)
    state: str = "running"

    @property
    def keys(self) -> dict[str, Any]:
        return {"lastStep": len(self.history) - 1, "keys": {}}

    def node(self) -> dict[str, Any]:
        return {
            **dict.fromkeys(("id", "name", "displayName"), self.name),
            **dict.fromkeys(("sweepName", "jobType", "commit", "description", "notes")),
            **dict.fromkeys(("createdAt", "heartbeatAt"), "2026-01-01T00:00:00"),
            **dict.fromkeys(("systemMetrics", "summaryMetrics"), "{}"),
            "projectId": "1",
            "tags": [],
            "readOnly": False,
            "user": VIEWER,
            "state": self.state,
            "config": self.attributes["config"],
            "group": self.attributes["groupName"],
            "historyLineCount": len(self.history),
            "historyKeys": self.keys,
        }


class WandbServer(ThreadingHTTPServer):
    """One project, ``lab/micro``; ``runs`` by their ids."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.runs: dict[str, StoredRun] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no error of the test."""

    def answer(self, query: str, given: dict[str, Any]) -> dict[str, Any]:
        if "upsertBucket" in query:
            return {"upsertBucket": {"bucket": self._upserted(given), "inserted": True}}
        if "createRunFiles" in query:
            files = [{"name": name, "uploadUrl": f"{self.url}/upload/{name}"} for name in given["files"]]
            return {"createRunFiles": {"runID": given["run"], "uploadHeaders": [], "files": files}}
        if "parquetHistory" in query:
            steps = [{"_step": step} for step in range(len(self.runs[given["runName"]].history))]
            return {"project": {"run": {"parquetHistory": {"parquetUrls": [], "liveData": steps}}}}
        if "query HistoryPage" in query:
            page = slice(given["minStep"], given["maxStep"])
            return {"project": {"run": {"history": self.runs[given["run"]].history[page]}}}
        if "query RunHistoryKeys" in query:
            return {"project": {"run": {"historyKeys": self.runs[given["name"]].keys}}}
        if "query Runs(" in query:
            return {"project": self._project() if given["project"] == "micro" else None}
        server = {"cliVersionInfo": {}, "latestLocalVersionInfo": None, "features": []}
        return {"viewer": VIEWER, "serverInfo": server}

    def _upserted(self, given: dict[str, Any]) -> dict[str, Any]:
        if given["displayName"]:  # the first word of a run; later ones complete its configuration
            self.runs[given["name"]] = StoredRun(given["name"], given)
        run = self.runs[given["name"]]
        run.attributes["config"] = given["config"] or run.attributes["config"]
        return {**run.node(), "project": {"id": "1", "name": "micro", "entity": {"id": "1", "name": "lab"}}}

    def _project(self) -> dict[str, Any]:
        edges = [{"node": run.node(), "cursor": run.name} for run in self.runs.values()]
        page = {"edges": edges, "pageInfo": {"endCursor": None, "hasNextPage": False}}
        return {"internalId": "1", "runCount": len(edges), "readOnly": False, "runs": page}

    def stream(self, run: str, sent: dict[str, Any]) -> None:
        part = sent.get("files", {}).get("wandb-history.jsonl")
        if part:
            self.runs[run].history[part["offset"] :] = part["content"]
        if sent.get("complete"):
            self.runs[run].state = "failed" if sent.get("exitcode") else "finished"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: WandbServer

    def do_POST(self) -> None:
        body = self._body()
        if self.path == "/graphql":
            asked = json.loads(body)
            return self._reply({"data": self.server.answer(asked["query"], asked.get("variables") or {})})
        if self.path.endswith("/file_stream"):
            self.server.stream(self.path.split("/")[-2], json.loads(body))
        return self._reply({})

    def do_PUT(self) -> None:
        self._body()
        self._reply({})

    def _body(self) -> bytes:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def _reply(self, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@contextmanager
def serving() -> Iterator[WandbServer]:
    """Answer while the context lasts."""
    with WandbServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
