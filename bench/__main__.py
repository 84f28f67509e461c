"""Lists the benches, or runs one or all of them.

    python -m bench
    python -m bench peers --steps 6
    python -m bench all [--quick]

Each bench runs in its own process and takes the options after its name. `--quick` gives all benches small sizes, to check that they run;
the numbers then have no meaning. Files that begin with an underscore are no benches.
"""

import ast
import difflib
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
QUICK = {
    "activations": "--hidden 64,128 --seq 64 --batch 2 --rounds 2 --steps 2",
    "aio": "--gigabytes 0.5 --rounds 1 --seconds 0.5",
    "checkpoint": "--hidden 128 --layers 2 --heads 2 --vocab 512 --rounds 1 --block 2",
    "chunks": "--models mlp --sizes 1,4 --rounds 1 --steps 4",
    "finetune": "--model tiny --engines infinity,fsdp2,plain --sequence 64 --curve 128,512 --device cpu --rounds 1 --steps 4",
    "gradients": "--hidden 128 --layers 2 --vocab 512 --seq 32 --rounds 2",
    "kernel": "--rounds 2 --num-chunks 2 --chunk-numel 1048576",
    "largest": "--rows 1",
    "load_on_other_ranks": "--params 3e6 --ranks 2",
    "lost_rank": "--ranks 2 --faults kill",
    "margin": "--margins 64MiB --hidden 128 --layers 2 --heads 4 --vocab 512 --seq 64 --rounds 1 --steps 4",
    "memory": "--hidden 256 --layers 2",
    "moments": "--steps 60 --seeds 1 --hidden 32 --layers 1",
    "needs": "--tokens 1024 --hidden 256 --layers 2",
    "overhead": "--hidden 64 --layers 2 --steps 4",
    "peers": "--engines infinity,fsdp2,plain --hidden 128 --layers 2 --heads 2 --vocab 512 --seq 32 --rounds 1 --steps 3",
    "pipeline": "--gigabytes 0.2 --rounds 1",
    "predict": "--only host device --steps 2",
    "prefetch": "--batches 1,4 --hidden 128 --layers 2 --vocab 512 --seq 32 --rounds 1 --steps 3",
    "scale": "--params 1e10 --batches 4 --nodes 1 2",
    "split": "--layers 6 --hidden 256 --forward-ms 1 --backward-ms 2 --rounds 1 --steps 2",
    "tensors": "--tensors 384 --hidden 8 --steps 3",
    "tiling": "--factors 1,4 --most-hidden 512",
    "tune": "--rounds 1 --pairs 3",
    "weak": "--nodes 1",
}


def main() -> int:
    name, *options = sys.argv[1:] or ["--help"]
    about = benches()
    if name in ("-h", "--help"):
        print("usage: python -m bench NAME [--help | options of its own], or python -m bench all [--quick]\n")
        print("\n".join(f"{each:{max(map(len, about))}}  {text}" for each, text in about.items()))
        return 0
    if name != "all":
        if name not in about:
            close = difflib.get_close_matches(name, about, n=1)
            print(f"python -m bench: there is no {name!r}{f'; did you mean {close[0]}?' if close else ''}", file=sys.stderr)
            return 2
        return run(name, options)
    if options not in ([], ["--quick"]):
        print("python -m bench all takes --quick or nothing; options belong to one bench", file=sys.stderr)
        return 2
    failed = []
    for each in about:
        print(f"\n== {each} {QUICK.get(each, '') if options else ''}", flush=True)
        if run(each, QUICK.get(each, "").split() if options else []):
            failed.append(each)
    if failed:
        print(f"\nfailed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


def benches() -> dict[str, str]:
    """The first line of each bench's docstring, by name."""
    paths = sorted(path for path in FOLDER.glob("*.py") if not path.name.startswith("_"))
    return {path.stem: (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0] for path in paths}


def run(name: str, options: list[str]) -> int:
    return subprocess.call([sys.executable, str(FOLDER / f"{name}.py"), *options])


if __name__ == "__main__":
    sys.exit(main())
