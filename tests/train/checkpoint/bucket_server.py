"""Google Cloud Storage on this machine: as much of its JSON API as orbax, tensorstore and gcsfs use.

https://cloud.google.com/storage/docs/json_api: objects with generations and conditions, listings with prefixes, reads
of ranges, uploads in one request and resumable ones. Every bucket is there.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import hashlib
import http.server
import itertools
import json
import re
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any


class Fault(Exception):
    """An answer with an error's status."""


class Bucketful:
    """The objects of all buckets, by (bucket, name): each is its content and its metadata."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], tuple[bytes, dict[str, Any]]] = {}
        self.uploads: dict[str, tuple[str, str, dict[str, str], bytearray]] = {}
        self.lock = threading.RLock()
        self.numbers = itertools.count(1)
        self.forbidden: set[str] = set()  # buckets that nobody may use
        self.before_put: Callable[[str], None] | None = None  # called with the name of an object that is to be written

    def names(self, bucket: str) -> list[str]:
        with self.lock:
            return sorted(name for at, name in self.objects if at == bucket)

    def get(self, bucket: str, name: str, query: dict[str, str]) -> tuple[bytes, dict[str, Any]]:
        with self.lock:
            generation = self._checked(bucket, name, query)
            if not generation:
                raise Fault(404)
            return self.objects[bucket, name]

    def put(self, bucket: str, name: str, data: bytes, query: dict[str, str]) -> dict[str, Any]:
        if self.before_put is not None:
            self.before_put(name)
        with self.lock:
            self._checked(bucket, name, query)
            about = {
                "kind": "storage#object", "name": name, "bucket": bucket, "size": str(len(data)),
                "generation": str(next(self.numbers)), "metageneration": "1", "timeCreated": now(), "updated": now(),
                "md5Hash": base64.b64encode(hashlib.md5(data).digest()).decode(),
            }  # fmt: skip
            self.objects[bucket, name] = bytes(data), about
            return about

    def patch(self, bucket: str, name: str, changes: dict[str, Any]) -> dict[str, Any]:
        with self.lock:
            data, about = self.get(bucket, name, {})
            number = str(int(about["metageneration"]) + 1)
            about = about | {"metageneration": number, "updated": now()} | changes
            self.objects[bucket, name] = data, about
            return about

    def delete(self, bucket: str, name: str, query: dict[str, str]) -> None:
        with self.lock:
            self.get(bucket, name, query)
            del self.objects[bucket, name]

    def list(self, bucket: str, query: dict[str, str]) -> dict[str, Any]:
        prefix, delimiter, start = query.get("prefix", ""), query.get("delimiter"), query.get("startOffset", "")
        items, prefixes = [], set()
        with self.lock:
            for name in self.names(bucket):
                if not name.startswith(prefix) or name < start or ("endOffset" in query and name >= query["endOffset"]):
                    continue
                head, found, _ = name[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
                if found:
                    prefixes.add(prefix + head + found)
                else:
                    items.append(self.objects[bucket, name][1])
        return {"kind": "storage#objects", "items": items, "prefixes": sorted(prefixes)}

    def _checked(self, bucket: str, name: str, query: dict[str, str]) -> int:
        """The object's generation, 0 where there is none. Raises: Fault where a condition does not hold."""
        generation = int(self.objects[bucket, name][1]["generation"]) if (bucket, name) in self.objects else 0
        if int(query.get("ifGenerationMatch") or generation) != generation:
            raise Fault(412)
        if "ifGenerationNotMatch" in query and int(query["ifGenerationNotMatch"]) == generation:
            raise Fault(304)
        return generation


def now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # an answer is sent at once: its second part would wait for the client
    stored: Bucketful
    address: str

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # gcsfs asks twice at once, and hangs up on the second answer
            super().handle()

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self) -> None:
        body = self._body()
        try:
            self._act(body)
        except Fault as fault:
            (status,) = fault.args
            self._send(status, {"error": {"code": status, "message": f"{self.command} {self.path}"}})

    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = answer

    def _act(self, body: bytes) -> None:
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        found = re.fullmatch(r"(/upload|/download)?/storage/v1/b/([^/]+)(?:/o(?:/([^/]+))?)?", url.path)
        if found is None:
            raise Fault(501)
        kind, bucket, name = found[1], urllib.parse.unquote(found[2]), urllib.parse.unquote(found[3] or "")
        if bucket in self.stored.forbidden:
            raise Fault(403)
        match self.command, kind:
            case "POST" | "PUT", "/upload" if "upload_id" in query:
                self._continue_upload(query["upload_id"], body)
            case "POST", "/upload":
                self._upload(bucket, query, body)
            case "GET", _ if name and (query.get("alt") == "media" or kind == "/download"):
                self._send_content(*self.stored.get(bucket, name, query))
            case "GET", _ if name:
                self._send(200, self.stored.get(bucket, name, query)[1])
            case "GET", _ if url.path.endswith("/o"):
                self._send(200, self.stored.list(bucket, query))
            case "GET", _:
                self._send(200, {"kind": "storage#bucket", "id": bucket, "name": bucket})
            case "PATCH", _:
                self._send(200, self.stored.patch(bucket, name, json.loads(body)))
            case "DELETE", _:
                self.stored.delete(bucket, name, query)
                self._send(204)
            case _:
                raise Fault(501)

    def _upload(self, bucket: str, query: dict[str, str], body: bytes) -> None:
        match query["uploadType"]:
            case "media":
                self._send(200, self.stored.put(bucket, query["name"], body, query))
            case "multipart":
                boundary = re.search('boundary="?([^";]+)', self.headers["Content-Type"])
                assert boundary is not None
                _, about, content, _ = re.split(rb"\r?\n?--" + re.escape(boundary[1].encode()), body)
                about, content = (re.split(rb"\r?\n\r?\n", part, maxsplit=1)[1] for part in (about, content))
                self._send(200, self.stored.put(bucket, json.loads(about)["name"], content, query))
            case "resumable":
                upload = str(next(self.stored.numbers))
                name = query.get("name") or json.loads(body)["name"]
                self.stored.uploads[upload] = bucket, name, query, bytearray()
                to = f"{self.address}/upload/storage/v1/b/{bucket}/o?uploadType=resumable&upload_id={upload}"
                self._send(200, {}, {"Location": to})

    def _continue_upload(self, upload: str, body: bytes) -> None:
        bucket, name, query, data = self.stored.uploads[upload]
        data += body
        if self.headers["Content-Range"].endswith("/*"):
            self._send(308, None, {"Range": f"bytes=0-{len(data) - 1}"})
        else:
            self._send(200, self.stored.put(bucket, name, bytes(data), query))

    def _send_content(self, data: bytes, about: dict[str, Any]) -> None:
        status, headers = 200, {"x-goog-generation": about["generation"], "x-goog-stored-content-length": about["size"]}
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(asked[1]), min(int(asked[2] or len(data)), len(data) - 1)
            if first > last:
                raise Fault(416)
            status, headers["Content-Range"] = 206, f"bytes {first}-{last}/{len(data)}"
            data = data[first : last + 1]
        self._send(status, data, headers)

    def _send(self, status: int, content: Any = None, headers: dict[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else b"" if content is None else json.dumps(content).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if not isinstance(content, bytes):
            self.send_header("Content-Type", "application/json")
        if status not in (204, 304):
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if status not in (204, 304):
            self.wfile.write(data)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)


@contextlib.contextmanager
def serving() -> Iterator[tuple[Bucketful, dict[str, str]]]:
    """(the objects, the environment variables by which clients find the server)."""
    stored = Bucketful()
    handler = type("BoundHandler", (Handler,), {"stored": stored})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    handler.address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    variables = {
        "STORAGE_EMULATOR_HOST": handler.address,
        "TENSORSTORE_GCS_HTTP_URL": handler.address,
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # which asks Google's own server for the kind of a bucket
        "NO_GCE_CHECK": "true",
    }
    try:
        yield stored, variables
    finally:
        server.shutdown()
        server.server_close()
