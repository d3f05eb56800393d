"""A hub on this machine: as much of its API as pushing and loading a model needs, kept in memory."""

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_loopback"


class LoopbackHub(ThreadingHTTPServer):
    """Repositories by name, as files of one commit; `url` is what HF_ENDPOINT should be."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.repos: dict[str, dict[str, bytes]] = {}
        self.requests: list[str] = []

    def commit_of(self, repo: str) -> str:
        digest = hashlib.sha1()
        for name, content in sorted(self.repos[repo].items()):
            digest.update(name.encode() + content)
        return digest.hexdigest()


@contextmanager
def serve_hub():
    with LoopbackHub() as hub:
        thread = threading.Thread(target=hub.serve_forever, daemon=True)
        thread.start()
        yield hub
        hub.shutdown()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: LoopbackHub

    def log_message(self, *args):
        self.server.requests.append(f"{self.command} {self.path}")

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._json({"error": "Invalid username or password."}, status=401)
        path = self.path.partition("?")[0]
        if path == "/api/repos/create":
            wanted = json.loads(body)
            repo = f"{wanted.get('organization') or 'user'}/{wanted['name']}"
            self.server.repos.setdefault(repo, {})
            return self._json({"url": f"{self.server.url}/{repo}", "name": repo})
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/main", path)
        if not found or found[1] not in self.server.repos:
            return self._missing("RepoNotFound")
        if found[2] == "preupload":
            names = [file["path"] for file in json.loads(body)["files"]]
            files = [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]
            return self._json({"files": files})
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                self.server.repos[found[1]][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        commit = self.server.commit_of(found[1])
        return self._json({"commitUrl": f"{self.server.url}/{found[1]}/commit/{commit}", "commitOid": commit})

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.partition("?")[0]
        if path == "/api/whoami-v2":
            return self._json({"name": "user", "type": "user", "orgs": []})
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/\w+)?", path):
            if found[1] not in self.server.repos:
                return self._missing("RepoNotFound")
            files = [{"rfilename": name} for name in sorted(self.server.repos[found[1]])]
            return self._json({"id": found[1], "sha": self.server.commit_of(found[1]), "siblings": files, "tags": []})
        if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/\w+/(.+)", path):
            content = self.server.repos.get(found[1], {}).get(found[2])
            if content is None:
                return self._missing("EntryNotFound" if found[1] in self.server.repos else "RepoNotFound", found[1])
            etag = f'"{hashlib.sha1(content).hexdigest()}"'
            return self._send(200, content, {"ETag": etag, "X-Repo-Commit": self.server.commit_of(found[1])})
        return self._missing("EntryNotFound")

    def _missing(self, code: str, repo: str | None = None):
        headers = {"X-Repo-Commit": self.server.commit_of(repo)} if repo in self.server.repos else {}
        self._send(404, b"", {"X-Error-Code": code, **headers})

    def _json(self, value, status=200):
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status, content, headers):
        self.send_response(status)
        for name, value in {"Content-Length": len(content), **headers}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
