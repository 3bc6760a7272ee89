"""Check `lade serve` against its `/openapi.json` with requests that schemathesis makes up.

Usage: python scripts/try_schema.py path/to/lade [EXAMPLES]
"""

import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "unsupported_method",
    "allow_header_conformance",
)
"""The others want more than any schema of JSON tells: that all of its bodies are taken, and no others."""
RUN_S = 240


def main(lade: str, examples: str = "40") -> int:
    """Run it; the exit code of schemathesis."""
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder) / "template"
        template.write_text(TEMPLATE)
        command = [lade, "serve", "--port", "0", "--json", "--quiet", "--max-rows", "2", "--answer-tokens", "4"]
        command += ["--max-waiting", "1024", "--context", "128", "--chat-template", str(template)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["url"]
            try:
                # examples of the schema, its bounds one by one, then made-up bodies, right and wrong ones
                run = ["run", f"{url}/openapi.json", "--checks", ",".join(CHECKS), "--max-examples", examples]
                run += ["--phases", "examples,coverage,fuzzing", "--max-time", str(RUN_S), "--request-timeout", "30"]
                run += ["--suppress-health-check", "all", "--warnings", "off", "--seed", "1"]
                return subprocess.run(
                    [sys.executable, "-m", "schemathesis.cli", *run], cwd=folder, check=False
                ).returncode
            finally:
                process.send_signal(signal.SIGTERM)
                assert process.wait(60) == 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
