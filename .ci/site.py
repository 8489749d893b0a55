#!/usr/bin/env python3
"""Looks at the built documentation as a reader does: links, and, in headless Chromium, code, tables and the search.

.ci/site.py HTML                    fails if a link leads nowhere, a page is wider than the window, a line of code is
                                    cut off at 1280 px, or a search of SEARCHES does not find its page first
.ci/site.py HTML --pictures FOLDER  takes pictures of some pages too, in light and dark, at 1280 and 390 px
"""

import argparse
import html.parser
import http.server
import json
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import urllib.parse
from pathlib import Path
from typing import Any

# What readers type, and the pages that may come first. A page that the site does not have is left out.
SEARCHES = {
    "hang": ["howto/troubleshooting"],
    "slow": ["howto/troubleshooting"],
    "deadlock": ["howto/troubleshooting"],
    "DDP": ["howto/ddp_fsdp"],
    "tensor parallel": ["howto/tensor_parallel"],
    "environment variable": ["reference/environment"],
    "all_reduce": ["howto/collectives", "reference/python/phalanx.collectives"],
    "install": ["howto/install"],
    "context parallel": ["howto/context_parallel"],
    "gpu": ["howto/gpu"],
    "benchmarks": ["explanation/benchmarks"],
}
WIDTHS = (1280, 390)  # of a laptop, and of a telephone
PICTURES = {  # name: page, width, height, dark
    "landing": ("index", 1280, 1800, False),
    "how-to": ("howto/ddp_fsdp", 1280, 1600, False),
    "reference-c": ("reference/c/collectives", 1280, 1600, False),
    "reference-python": ("reference/python/phalanx.collectives", 1280, 1600, False),
    "benchmarks": ("explanation/benchmarks", 1280, 1600, False),
    "goals": ("explanation/goals", 1280, 1600, False),
    "mobile": ("index", 390, 844, False),
    "mobile-how-to": ("howto/collectives", 390, 844, False),
    "dark": ("index", 1280, 1800, True),
    "dark-explanation": ("explanation/algorithms", 1280, 1600, True),
}
SWITCHES = [
    "--headless",
    "--no-sandbox",
    "--no-first-run",
    "--hide-scrollbars",
    *(f"--disable-{what}" for what in ("gpu", "quic", "background-networking", "component-update", "sync")),
]
SECONDS = 240

# Loads each page into a frame of each width, then each search, and sends what it saw.
SCRIPT = """
<body><script>
const load = (url, width) => new Promise((done) => {
  const frame = document.createElement("iframe");
  frame.style = `width:${width}px;height:900px;border:0`;
  frame.onload = () => done(frame);
  frame.src = url;
  document.body.appendChild(frame);
});
const cutOff = (page) => [...page.querySelectorAll("article pre")].flatMap((pre) => {
  const edge = pre.getBoundingClientRect().left + pre.clientWidth + 1;
  const range = page.createRange();
  range.selectNodeContents(pre);
  const ends = new Set([...range.getClientRects()].filter((box) => box.right > edge).map((box) => Math.round(box.top)));
  return ends.size ? [ends.size] : [];
}).reduce((all, count) => all + count, 0);
const look = async ({ pages, widths, searches }) => {
  const seen = { cut: [], wide: [], first: {}, lines: 0 };
  for (const page of pages) for (const width of widths) {
    const frame = await load(`/${page}`, width);
    const inside = frame.contentDocument;
    const wide = inside.documentElement.scrollWidth;
    if (wide > width + 1) seen.wide.push([page, width, wide]);
    if (width === widths[0]) {
      const count = cutOff(inside);
      if (count) seen.cut.push([page, count]);
      const code = [...inside.querySelectorAll("article pre")].map((pre) => pre.textContent.trimEnd());
      seen.lines += code.join("\\n").split("\\n").length;
    }
    frame.remove();
  }
  for (const search of searches) {
    const frame = await load(`/search.html?q=${encodeURIComponent(search)}`, widths[0]);
    let first = null;
    for (let tries = 0; tries < 100 && !first; ++tries) {
      await new Promise((done) => setTimeout(done, 100));
      first = frame.contentDocument.querySelector("ul.search li a");
    }
    seen.first[search] = first ? first.getAttribute("href") : "";
    frame.remove();
  }
  return seen;
};
fetch("/__wanted").then((answer) => answer.json()).then(look)
  .then((seen) => JSON.stringify(seen), (error) => JSON.stringify({ error: String(error.stack) }))
  .then((text) => fetch("/__seen", { method: "POST", body: text }));
</script></body>
"""


# ---- links ---------------------------------------------------------------------------------------------------------


class Page(html.parser.HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors.update(filter(None, (given.get("id"), given.get("name"))))
        self.links += filter(None, (given.get("href"), given.get("src")))


def broken_links(folder: Path, pages: dict[str, Page]) -> list[str]:
    """Links to files or anchors of this site that are not there."""
    problems = []
    for name, page in pages.items():
        for link in page.links:
            parts = urllib.parse.urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            path = urllib.parse.unquote(parts.path)
            target = (folder / name).parent / path if path else folder / name
            other = pages.get(str(target.resolve().relative_to(folder))) if target.exists() else None
            anchor = urllib.parse.unquote(parts.fragment)
            if not target.exists() or (other and anchor and anchor not in other.anchors):
                problems.append(f"{name}: {link}")
    return problems


# ---- Chromium ------------------------------------------------------------------------------------------------------


class Site(http.server.ThreadingHTTPServer):
    """Serves the built pages, and the page whose script looks at them."""

    def __init__(self, folder: Path, wanted: dict[str, Any]) -> None:
        self.seen: queue.Queue[str] = queue.Queue()
        site = self

        class Handler(http.server.SimpleHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/__look":
                    self.send(SCRIPT, "text/html")
                elif self.path == "/__wanted":
                    self.send(json.dumps(wanted), "application/json")
                elif self.path.startswith("/__frame/"):  # a page at a width that windows cannot have
                    width, page = self.path.removeprefix("/__frame/").split("/", 1)
                    style = f"width:{width}px;height:100vh;border:0"
                    self.send(f'<body style="margin:0"><iframe style="{style}" src="/{page}"></iframe>', "text/html")
                else:
                    super().do_GET()

            def do_POST(self) -> None:
                site.seen.put(self.rfile.read(int(self.headers["Content-Length"])).decode())
                self.send("", "text/plain")

            def send(self, text: str, kind: str) -> None:
                self.send_response(200)
                self.send_header("Content-Type", f"{kind}; charset=utf-8")
                self.send_header("Content-Length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *given: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), lambda *given: Handler(*given, directory=str(folder)))
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, *given: object) -> None:
        pass  # Chromium hangs up on what it needs no longer

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_port}/{path}"


def browse(chromium: str, *given: str) -> subprocess.Popen[bytes]:
    nothing = subprocess.DEVNULL
    return subprocess.Popen([chromium, *SWITCHES, *given], stdin=nothing, stdout=nothing, stderr=nothing)


def look(chromium: str, site: Site) -> dict[str, Any]:
    """What the script saw. Chromium runs until it has been told."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = browse(chromium, f"--user-data-dir={profile}", "--remote-debugging-port=0", site.url("__look"))
        try:
            return dict(json.loads(site.seen.get(timeout=SECONDS)))
        except queue.Empty:
            return {"error": f"no answer of Chromium within {SECONDS} s"}
        finally:
            browser.terminate()
            browser.wait(timeout=30)


def photograph(chromium: str, site: Site, folder: Path, pages: set[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, (page, width, height, dark) in PICTURES.items():
        if f"{page}.html" not in pages:
            print(f"no picture {name}: there is no page {page}")
            continue
        path = f"__frame/{width}/{page}.html" if width < 500 else f"{page}.html"
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
            switches = [f"--user-data-dir={profile}", f"--window-size={width},{height}"]
            switches += ["--blink-settings=preferredColorScheme=0"] if dark else []
            browser = browse(chromium, *switches, f"--screenshot={(folder / name).resolve()}.png", site.url(path))
            try:
                browser.wait(timeout=60)
            except subprocess.TimeoutExpired:
                browser.kill()
                browser.wait()
                print(f"no picture {name}: Chromium took more than 60 s")


def judge(seen: dict[str, Any]) -> list[str]:
    """What is wrong with what Chromium saw."""
    if "error" in seen:
        return [f"Chromium: {seen['error']}"]
    problems = [f"{page}: {count} lines of code are cut off at {WIDTHS[0]} px" for page, count in seen["cut"]]
    problems += [f"{page}: is {wide} px wide in a window of {width} px" for page, width, wide in seen["wide"]]
    for search, first in seen["first"].items():
        page = first.partition("#")[0].partition("?")[0].removesuffix(".html")
        if page not in SEARCHES[search]:
            problems.append(f"search {search!r}: finds {page or 'nothing'} first, not {SEARCHES[search][0]}")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("html", type=Path, metavar="HTML", help="folder of the built pages")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="take pictures of some pages into this folder")
    given = parser.parse_args()
    folder = given.html.resolve()
    pages = {
        str(path.relative_to(folder)): Page(path.read_text(encoding="utf-8"))
        for path in sorted(folder.rglob("*.html"))
        if "_static" not in path.parts
    }
    if not pages:
        parser.error(f"there are no pages in {folder}")
    problems = broken_links(folder, pages)
    links = sum(len(page.links) for page in pages.values())
    print(f"{len(pages)} pages, {links} links, {len(problems)} of them broken")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        print("skipped: code, tables and searches are not looked at, as there is no Chromium (Debian: chromium)")
    else:
        searches = [text for text, expected in SEARCHES.items() if any(f"{page}.html" in pages for page in expected)]
        if "search.html" in pages:
            missing = [text for text in SEARCHES if text not in searches]
            problems += [f"search {text!r}: there is no page {SEARCHES[text][0]}" for text in missing]
        wanted = {"pages": sorted(pages), "widths": WIDTHS, "searches": searches}
        site = Site(folder, wanted)
        seen = look(chromium, site)
        problems += judge(seen)
        if "error" not in seen:
            cut = sum(count for _, count in seen["cut"])
            print(f"{seen['lines']} lines of code, {cut} of them cut off at {WIDTHS[0]} px")
            print("\n".join(f"search {search!r}: {first}" for search, first in seen["first"].items()))
        if given.pictures:
            photograph(chromium, site, given.pictures, set(pages))
        site.shutdown()
    print("\n".join(problems) if problems else "the pages are in order")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
