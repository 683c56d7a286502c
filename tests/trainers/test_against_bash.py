"""Words, tests and whole shell scripts, drawn at random: what is told of them is what bash makes of them."""

import shlex
import shutil
import subprocess
from random import Random

import pytest

from memplan.importer.shell.expansions import Scope, fields
from memplan.importer.shell.shell_commands import shell_commands
from memplan.importer.shell.shell_tests import outcome

BASH = shutil.which("bash")
pytestmark = pytest.mark.skipif(BASH is None, reason="compares with bash")

TEXTS = {"A": "1  2", "N": "8", "M": "-3", "P": "a/b/Qwen3-8B.a.yaml", "E": "", "S": " x "}
LISTS = {"L": ["--x", "a b"]}
ARGUMENTS = ("7", "x y")
SCRIPT = "\n".join(
    (
        "set -f",
        'show() { for one in "$@"; do printf "[%s]" "$one"; done; echo; }',
        *(f"{name}={shlex.quote(text)}" for name, text in TEXTS.items()),
        *(f"{name}=({shlex.join(items)})" for name, items in LISTS.items()),
        f"set -- {shlex.join(ARGUMENTS)}",
    )
)


def answers(lines):
    """What bash prints for each line."""
    script = "\n".join((SCRIPT, *lines))
    ran = subprocess.run([BASH or "", "-s"], input=script, capture_output=True, text=True, check=False)
    return ran.stdout.split("\n")[:-1]


def number(rng, depth=0):
    """Arithmetic of whole numbers, whose divisors are none."""
    kind = rng.randrange(5 if depth < 2 else 2)
    if kind == 0:
        return str(rng.choice((0, 1, 2, 7, 16, 1000)))
    if kind == 1:
        return rng.choice(("N", "$N", "$M", "${M}", "$1", "(-7)"))
    if kind == 2:
        return f"({number(rng, depth + 1)} {rng.choice('/%')} {rng.choice((1, 2, 3, '(-2)'))})"
    return f"({number(rng, depth + 1)} {rng.choice('+-*')} {number(rng, depth + 1)})"


def computed(rng):
    if rng.random() < 0.2:
        return f"$(expr {rng.randrange(20)} {rng.choice(('+', '-', '/', '%'))} {rng.randrange(1, 9)})"
    left, right = number(rng), number(rng)
    compared = f"{left} {rng.choice(('<', '<=', '==', '!=', '>', '>='))} {right}"
    return f"$(({rng.choice((left, compared, f'{compared} ? {left} : 5'))}))"


def piece(rng):
    """A part of a word."""
    name, pattern = rng.choice([*TEXTS]), rng.choice(("a", "*/", "/*", ".*", "*.", "?", "*a*", "", "x"))
    plain = [f"${name}", f"${{{name}}}", f"${{#{name}}}", f"${{{name},,}}", f"${{{name}^^}}"]
    plain += [f"${{{name}{sign}{pattern}}}" for sign in ("#", "##", "%", "%%")]
    plain += [f"${{{rng.choice((name, 'Q'))}{sign}d$N}}" for sign in (":-", "-", ":+", "+")]
    plain += ["$#", "$1", "${2}", "${L[1]}", "$L", "${#L[@]}", computed(rng)]
    if rng.random() < 0.25:
        return rng.choice(
            ("x", "--y=", "'a  b'", "a\\ b", "${L[@]}", "${L[*]}", '"${L[*]}"', '"${L[@]}"', '"$@"', "$@")
        )
    one = rng.choice(plain)
    return rng.choice((one, f'"{one}"', f'"p {one}"'))


def test_a_word_becomes_what_bash_makes_of_it():
    rng, known = Random("words"), 0
    words = ["".join(piece(rng) for _ in range(rng.choice((1, 1, 2, 3)))) for _ in range(600)]
    for word, expected in zip(words, answers(f"show {word}" for word in words), strict=True):
        told = fields(word, Scope({**TEXTS, **LISTS}, ARGUMENTS))
        if any("$" in one for one in told):
            continue
        known += 1
        assert "".join(f"[{one}]" for one in told) == expected, word
    assert known > 500


def condition(rng, depth=0):
    """The words of a test."""
    if depth < 2 and rng.random() < 0.3:
        return [*condition(rng, depth + 1), rng.choice(("&&", "||")), *condition(rng, depth + 1)]
    if rng.random() < 0.2:
        return ["!", *condition(rng, 2)]
    value = rng.choice(('"$A"', "$N", "$M", '"$E"', "8", "-3", "07", "b", "''", '"$Q"', "$P"))
    if rng.random() < 0.3:
        return [*rng.choice(((), ("-z",), ("-n",))), value]
    if rng.random() < 0.5:
        return ["$N", rng.choice(("-eq", "-ne", "-lt", "-le", "-gt", "-ge")), rng.choice(("7", "8", "9", "$M", "$N"))]
    return [value, rng.choice(("=", "==", "!=")), rng.choice(("8", "'*'", "*", "a*", "?", '"$A"', "$N", "b"))]


def test_a_test_ends_as_in_bash():
    rng, known = Random("tests"), 0
    tests = [condition(rng) for _ in range(400)]
    lines = (f"if [[ {' '.join(words)} ]]; then echo True; else echo False; fi" for words in tests)
    for words, expected in zip(tests, answers(lines), strict=True):
        told = outcome(["[[", *words, "]]"], Scope({**TEXTS, **LISTS}, ARGUMENTS))
        known += told is not None
        assert told is None or str(told) == expected, words
    assert known > 350


SET_UP = 'N=4\nX=8\nY=b\nR=(--x "a b")\n'
STARTED = 'set --\npython() { printf "[%s]" "$@"; echo; }\nexport -f python\n'


def value(rng):
    return rng.choice(("7", "8", "b", "$Y", '"$X $Y"', "a-$X", "$((N * 2))", "${Y%b}", "''"))


def started(rng):
    name = rng.choice("abc")
    return rng.choice(
        (
            f'python {name}.py "$X" $Y "${{R[@]}}"',
            f"python {name}.py \\\n  --x=$X  # {name}",
            f"RUN={name} python {name}.py ${{1:-none}}",
        )
    )


def held(rng):
    own = rng.choice(('[ "$X" = 8 ]', "[[ $X == 8* ]]", '[[ -n "$Y" && $Y != b ]]', '[ ! -z "$X" ]', "true", "false"))
    return rng.choice((own, own, f"! {own}", f"{own} && true", f"{own} || false"))


def statement(rng, depth=0):
    """A statement of a script, on a line or several."""
    kind = rng.randrange(12 if depth < 3 else 6)
    inner = "\n".join(statement(rng, depth + 1) for _ in range(rng.randrange(1, 3))) if kind > 6 else ""
    if kind < 2:
        return f"{rng.choice('XY')}{rng.choice(('', '', '+'))}={value(rng)}"
    if kind == 2:
        return f"R{rng.choice(('', '+'))}=({value(rng)} {value(rng)})"
    if kind in (3, 4):
        return started(rng)
    if kind == 5:
        return f"{held(rng)} {rng.choice(('&&', '||'))} {started(rng)}"
    if kind == 6:
        return rng.choice(
            (
                'eval "python e.py $X"',
                'bash -c "python c.py $Y"',
                "bash <<EOF\npython h.py $X\nEOF",
                "bash <<'EOF'\npython h.py\nEOF",
            )
        )
    if kind in (7, 8):
        rest = f"elif {held(rng)}; then\n{inner}\n" if kind == 8 else ""
        return f"if {held(rng)}; then\n{inner}\n{rest}else\n{statement(rng, depth + 1)}\nfi"
    if kind == 9:
        return f"case $Y in\n  8|{rng.choice('ab')}*) {inner}\n;;\n  *)\n{statement(rng, depth + 1)}\n;;\nesac"
    if kind == 10:
        return f"for one in {value(rng)}; do\n{inner}\npython f.py $one\ndone"
    return f"work() {{\n{inner}\npython w.py $1 $#\n}}\nwork {value(rng)} 'q r'"


def test_a_script_starts_what_it_starts_in_bash():
    rng, known = Random("scripts"), 0
    scripts = [SET_UP + "\n".join(statement(rng) for _ in range(rng.randrange(2, 7))) for _ in range(80)]
    printed = "\n".join(answers(f"(\n{STARTED}{script}\n)\necho ==" for script in scripts)).split("==")
    for script, expected in zip(scripts, printed[:-1], strict=True):
        told = ["".join(f"[{word}]" for word in one.words[1:]) for one in shell_commands(script, "run.sh")]
        if "$" not in "".join(told):
            known += 1
            assert told == [line for line in expected.split("\n") if line], script
    assert known > 65
