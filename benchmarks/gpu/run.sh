#!/usr/bin/env bash
# One command for a machine with one NVIDIA GPU and no network, in the minutes it is given; see README.md beside this file.
#
#     benchmarks/gpu/run.sh [OUT] [--minutes N] [--parts NAME,...] [--model FOLDER] [--prompts FILE,...] [--size N]
#         [--shapes NAME,...] [--wheels DIR] [--python PROGRAM] [--device NAME] [--quick]
#
# OUT       folder for everything; not given: benchmarks/gpu/results
# --minutes all parts end within them; not given: 6
# --parts   of tests, steps, bits, text, sampled, batches, attention, quantised; not given: the first four
# --model   folder of a Llama model, padded to --size parameters; not given: the embedded model
# --prompts JSON lines, as `lade bench` reads them; not given: its own
# --size    not given: 7e9; 0: as it is
# --shapes  of the models whose passes are timed, see steps.py; not given: llama-3-8b
# --wheels  folder of .whl files of what the machine's Python lacks
# --python  not given: python3
# --device  not given: cuda; with cpu the script itself can be tried
# --quick   a few tokens, only to see that everything runs
#
# Exit code 0: done. 1: a test failed, an output differs, or time was over too early. 2: something is missing.
set -euo pipefail

TESTS_S=90 ATTENTION_S=60 STEPS_S=60 BITS_S=75 QUANTISED_S=45 GRACE_S=20 LEAST_S=20
METHODS=hf,hf-prompt-lookup,plain,lookahead=15,5,15,adaptive,adaptive-warm
SAMPLED_METHODS=hf,plain,adaptive,adaptive-warm TEMPERATURE=0.7 BATCHES=8,16
PARTS=tests,steps,bits,text,sampled,batches,attention,quantised

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
root=$PWD called_from=$OLDPWD
out=benchmarks/gpu/results wheels='' python=python3 device=cuda model='' prompts='' size=7e9 shapes=llama-3-8b minutes=6
parts=tests,steps,bits,text dtype=bfloat16 failed=0
answers=(--limit 3 --max-new-tokens 128) tests=() attention=() steps=() bits=() quantised=()

absolute() { case $1 in /*) echo "$1" ;; *) echo "$called_from/$1" ;; esac; }

refuse() {
    echo "$1" >&2
    exit 2
}

while (($#)); do
    case $1 in
        --quick)
            answers=(--limit 2 --max-new-tokens 6) tests=(-k 'greedy and llama') steps=(--rounds 2) quantised=(--rounds 1)
            bits=(--rounds 2 --cached 40 --answers 1 --tokens 8)
            attention=(--shapes 4x2x32 --lengths 16,64 --steps 1,8 --rounds 2 --no-flex)
            ;;
        --minutes | --parts | --model | --prompts | --size | --shapes | --wheels | --python | --device)
            (($# > 1)) || refuse "$1 needs a value"
            printf -v "${1#--}" %s "$2"
            shift
            ;;
        -*) refuse "no option $1: see the head of $root/benchmarks/gpu/run.sh" ;;
        *) out=$(absolute "$1") ;;
    esac
    shift
done

wanted() { [[ ,$parts, == *,$1,* ]]; }
for part in ${parts//,/ }; do
    [[ ,$PARTS, == *,$part,* ]] || refuse "no part $part: give some of $PARTS as --parts"
done
[[ $minutes =~ ^[1-9][0-9]*$ ]] || refuse "--minutes is '$minutes': give a whole number, such as 6"
TOTAL_S=$((60 * minutes - GRACE_S))
case $python in */*) python=$(absolute "$python") ;; esac

files=()
[[ -z $model ]] || files+=(--model "$(absolute "$model")")
IFS=, read -ra given <<<"$prompts"
for file in "${given[@]}"; do files+=(--prompts "$(absolute "$file")"); done
[[ $size == 0 ]] || files+=(--inflate "$size")

# Packages that came as wheels go before those of the machine; nothing is installed for good.
export PYTHONPATH=$root:$root/lab PYTHONUNBUFFERED=1
if [[ $wheels ]]; then
    wheels=$(absolute "$wheels")
    compgen -G "$wheels/*.whl" >/dev/null || refuse "no .whl files in $wheels"
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$wheels"/*.whl
    PYTHONPATH=$site:$root:$root/lab
fi
"$python" - "$device" <<'PYTHON' || refuse 'not begun'
import re, sys, tomllib
from importlib.metadata import PackageNotFoundError, version

with open("pyproject.toml", "rb") as file:
    wanted = [re.match(r"[\w-]+", each)[0] for each in tomllib.load(file)["project"]["dependencies"]]
missing = []
for name in [*wanted, "pydantic", "matplotlib", "pytest", "pytest-timeout", "hypothesis"]:  # typer needs pydantic
    try:
        print(f"{name} {version(name)}", end="; ")
    except PackageNotFoundError:
        missing.append(name)
print(f"Python {sys.version.split()[0]}")
if missing:
    sys.exit(f"this Python lacks {', '.join(missing)}: give a folder with wheels of them as --wheels")
import torch

if sys.argv[1].startswith("cuda") and not torch.cuda.is_available():
    sys.exit("torch sees no GPU: give --device cpu to try the script without one")
PYTHON

# stage NAME LIMIT COMMAND...: at most LIMIT seconds; then it is interrupted as by Ctrl-C, and saves what it has.
stage() {
    local name=$1 limit=$2 code=0
    shift 2
    ((limit <= TOTAL_S - SECONDS)) || limit=$((TOTAL_S - SECONDS))
    if ((limit < LEAST_S)); then
        echo "== $name: no time left"
        failed=1
        return
    fi
    echo "== $name: at most $limit s"
    env --default-signal=INT timeout --foreground --signal=INT --kill-after=$GRACE_S "$limit" "$@" || code=$?
    echo "== $name: exit code $code, $SECONDS of $TOTAL_S s gone"
    ((code == 0)) || failed=1
}

mkdir -p "$out"
run_tests() { # other plugins and versions than the project's may be there: they and their warnings are no errors here
    local files chosen='gpu and not slow'
    [[ $device != cpu ]] || chosen='not gpu and not slow'
    mapfile -t files < <(grep -rl --include='test_*.py' 'mark\.gpu' tests)
    PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 stage 'parity tests' $TESTS_S "$python" -m pytest -m "$chosen" -p pytest_timeout \
        -p no:cacheprovider -W default "${tests[@]}" "${files[@]}"
}
if wanted tests; then
    run_tests 2>&1 | tee "$out/tests.log"
    grep -qE '== parity tests: exit code 0,' "$out/tests.log" || failed=1
    grep -E '^[0-9]+ (passed|failed|skipped)|, [0-9]+ passed' "$out/tests.log" | tail -n 1 >"$out/parity.txt" || true
fi

if wanted steps; then
    for shape in ${shapes//,/ }; do
        stage "passes of $shape" $STEPS_S "$python" benchmarks/gpu/steps.py --shape "$shape" --dtype $dtype \
            --device "$device" "${steps[@]}" --out "$out/steps-$shape.json"
    done
fi

[[ -z $model ]] || bits+=(--model "$(absolute "$model")")
! wanted bits || stage "bits of model.generate" $BITS_S "$python" benchmarks/gpu/bits.py --shape "${shapes%%,*}" \
    --device "$device" --limit-s $((BITS_S - 25)) "${bits[@]}" --out "$out/bits.json"

! wanted attention || stage attention $ATTENTION_S "$python" benchmarks/gpu/attention.py --out "$out" \
    --device "$device" --limit-s $((ATTENTION_S - 15)) "${attention[@]}"

! wanted quantised || stage "quantised weights" $QUANTISED_S "$python" benchmarks/gpu/quantised.py --params "$size" \
    --device "$device" --limit-s $((QUANTISED_S - 20)) "${quantised[@]}" --out "$out/quantised.json"

# What is left of the time is shared by the parts that take as long as they are given.
long=0
for part in text sampled batches; do ! wanted $part || long=$((long + 1)); done
run_long() { # NAME COMMAND...
    local share=$(((TOTAL_S - SECONDS) / long))
    long=$((long - 1))
    stage "$1" "$share" "${@:2}"
}

lade_bench=("$python" -m lade_lab bench "${files[@]}" --dtype $dtype --device "$device" --no-pack "${answers[@]}")
! wanted text || run_long text "${lade_bench[@]}" --allow-near-ties --resume --methods $METHODS --out "$out/text"
! wanted sampled || run_long "sampled text" "${lade_bench[@]}" --allow-near-ties --resume --methods $SAMPLED_METHODS \
    --temperature $TEMPERATURE --out "$out/sampled"
! wanted batches || run_long "batches of $BATCHES" env COLUMNS=120 bash -c '"${@:2}" >"$1"' - "$out/batches.txt" \
    "${lade_bench[@]}" --batch-size $BATCHES --allow-near-ties

tar --create --gzip --file "$out.tar.gz" --directory "$out" .
echo "== everything is in $out, and in $out.tar.gz to carry away"
if [[ $out == benchmarks/gpu/results ]]; then
    "$python" benchmarks/summarize.py
fi
exit $failed
