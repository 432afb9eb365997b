"""A server of one recording in ranges, which counts what it sends."""

import http.server
import re


class Handler(http.server.BaseHTTPRequestHandler):
    """One file, in ranges; what it sends is counted."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_HEAD(self):
        self.answer(with_body=False)

    def do_GET(self):
        self.answer(with_body=True)

    def answer(self, with_body):
        at = self.server
        at.headers.append(self.headers)
        path = self.path.partition("?")[0].removeprefix("/bucket")  # S3 puts a bucket before it
        if path != "/r.safetensors" or at.status != 200:
            self.send_error(at.status if at.status != 200 else 404)
            return
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        data, status = at.data, 200
        if asked and at.has_ranges:
            begin, end = int(asked[1]), int(asked[2]) + 1
            data, status = data[begin:end], 206
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        if at.etag:
            self.send_header("ETag", at.etag)
            self.send_header("Last-Modified", "Wed, 25 Nov 2026 12:00:00 GMT")
        if status == 206:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(at.data)}")
        self.end_headers()
        if with_body:
            at.requests.append(len(data))
            if at.cut:
                data = data[: len(data) // 2]
                self.close_connection = True
            try:
                self.wfile.write(data)
            except OSError:  # the other end has seen enough
                self.close_connection = True

    def log_message(self, *values):
        pass


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.data, self.requests, self.headers = b"", [], []
        self.has_ranges, self.cut, self.etag, self.status = True, False, '"1"', 200
        self.address = f"http://127.0.0.1:{self.server_port}/r.safetensors"

    @property
    def sent(self):
        """Bytes since it was last asked."""
        count, self.requests = sum(self.requests), []
        return count

    def serve(self, recording, path, **options):
        recording.save(path, **options)
        self.data = path.read_bytes()
        return self.address
