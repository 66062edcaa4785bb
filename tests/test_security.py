"""What docs/security.md promises about the source: no call that runs what a file says, no reader around the limits."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "ottava"
CALLS = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "pickle.load", "pickle.loads", "pickle.Unpickler",
    "marshal.load", "marshal.loads", "shelve.open", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "torch.load",
    "torch.hub.load", "numpy.load", "np.load", "runpy.run_path", "runpy.run_module", "urllib.request.urlopen",
    "requests.get", "hf_hub_download", "snapshot_download", "socket.create_connection", "from_pretrained",
}  # fmt: skip
"""What runs code of a file, or fetches one."""
ALLOWED = {
    ("cli/app.py", "runpy.run_path"): "torch's own version.py, found beside torch",
    ("watching/launch.py", "compile"): "`ottava watch SCRIPT` runs the user's script: that is its purpose",
    ("watching/launch.py", "exec"): "the same",
    ("base/untrusted.py", "yaml.load"): "with _Loader, a SafeLoader",
    ("interop/safe_pickle.py", "torch.load"): "with weights_only",
    ("watching/launch.py", "runpy.run_path"): "the same",
    ("compat/transformer_engine/__main__.py", "runpy.run_path"): "runs the user's script",
    ("kernels/native/trial.py", "runpy.run_path"): "a file of the package",
    (
        "compat/transformer_engine/pytorch/execution.py",
        "runpy.run_path",
    ): "code in feature_dirs, which the script names",
    ("prove/prover.py", "runpy.run_path"): "the reproducer that it has written a moment ago",
    ("serving/executed.py", "from_pretrained"): "from a folder, as below",
    ("serving/answers.py", "from_pretrained"): "from a folder, with local_files_only and without remote code",
    ("compat/on_cpu.py", "torch.load"): "wraps the user's own call",
    ("prove/certificate.py", "torch.load"): "with weights_only: a case that a process of ours saved a moment ago",
    ("cli/prove.py", "torch.load"): "with weights_only: operators that a process of ours noted a moment ago",
    ("serving/rollout.py", "torch.load"): "with weights_only: a dump of a trainer",
}
READS = {"read_text", "read_bytes"}
READERS = {
    "base/untrusted.py": "the limits themselves",
    "kernels/native/build.py": "its own sources, and the private cache whose owner it checks",
    "kernels/gemm_choice.py": "its own sources",
    "kernels/native/prebuilt.py": "files of the package", "kernels/native/wheel.py": "what it has compiled",
    "report/frame.py": "a page that ottava wrote beside this one",
    "report/charts.py": "a file of the package", "report/live.py": "the same", "base/language.py": "the same",
    "train/demo.py": "what the demo wrote a moment ago, under its lock",
    "train/run_folder.py": "metrics.jsonl, after regular_size; the lock's own text",
    "record/schema.py": "a part, after regular_size",
    "train/llama.py": "a text that the user names, after regular_size",
    "record/writer.py": "files of the run that it writes itself",
    "watching/launch.py": "the user's script",
    "bench/cpu.py": "its own files", "bench/gpu.py": "its own files",
}  # fmt: skip


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Dotted name, and last name of methods, of every call."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            yield name, node
            if "." in name:
                yield name.rpartition(".")[2], node


def complaints(where: str, source: str) -> list[str]:
    """Calls of a module that are not allowed there."""
    found = []
    for name, node in calls(ast.parse(source)):
        if name in CALLS and not (name in ("compile", "exec", "eval") and isinstance(node.func, ast.Attribute)):
            words = {word.arg: ast.unparse(word.value) for word in node.keywords}
            if name == "torch.load" and words.get("weights_only") != "True":
                found.append(f"{where}:{node.lineno}: torch.load without weights_only")
            elif (where, name) not in ALLOWED:
                found.append(f"{where}:{node.lineno}: {name}")
            elif name == "from_pretrained" and (words.get("local_files_only"), words.get("trust_remote_code")) != (
                "True",
                "False",
            ):
                found.append(f"{where}:{node.lineno}: from_pretrained may download, or run code of the folder")
        if any(word.arg == "shell" for word in node.keywords):
            found.append(f"{where}:{node.lineno}: a shell")
        if name in READS and isinstance(node.func, ast.Attribute) and where not in READERS:
            found.append(f"{where}:{node.lineno}: {name} around the limits of base/untrusted.py")
    return found


def test_nothing_runs_what_a_file_says() -> None:
    """And whatever is listed as an exception is still there."""
    paths = sorted(SOURCE.rglob("*.py"))
    names = {path.relative_to(SOURCE).as_posix(): path.read_text("utf-8") for path in paths}
    assert [line for name, text in names.items() for line in complaints(name, text)] == []
    for where, name in ALLOWED:
        assert f"{name.rpartition('.')[2]}" in names[where], f"{name} has gone from {where}"


@pytest.mark.parametrize(
    "source",
    ["eval(x)", "import os\nos.system('x')", "torch.load(x)", "torch.load(x, weights_only=False)", "yaml.load(x)",
     "subprocess.run('x', shell=True)", "pickle.loads(x)", "Path('a').read_text()", "AutoConfig.from_pretrained(x)"],
)  # fmt: skip
def test_the_rule_can_fail(source: str) -> None:
    assert complaints("nn/layer.py", source)


def test_templates_escape_and_pages_load_nothing() -> None:
    """Jinja's autoescape is on wherever an environment is made; `|safe` stands on what ottava made, listed here."""
    made = [(path, node) for path in SOURCE.rglob("*.py") for name, node in calls(ast.parse(path.read_text("utf-8")))
            if name == "Environment"]  # fmt: skip
    assert made
    for path, node in made:
        assert {word.arg: ast.unparse(word.value) for word in node.keywords}.get("autoescape") == "True", path
    for template in SOURCE.rglob("*.j2"):
        assert not re.search(r"""(src|href)=["']https?://""", template.read_text("utf-8")), template
