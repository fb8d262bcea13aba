"""Honest programs and their tests, for the code reward: every one must be paid."""

from __future__ import annotations

# ruff: noqa: E501 (programs in one line each)
# fmt: off
import itertools
from collections.abc import Iterator
from typing import Any

FUNCTIONS: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("add", "(a, b):\n    return a + b", [("1, 2", "3"), ("-1, 1", "0"), ("2**70, 1", "2**70 + 1")]),
    ("is_prime", "(n):\n    return n > 1 and all(n % d for d in range(2, int(n ** 0.5) + 1))", [("7", "True"), ("9", "False")]),
    ("fib", "(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a", [("10", "55"), ("90", "2880067194370816120")]),
    ("reverse_words", "(s):\n    return ' '.join(reversed(s.split()))", [("'a b  c'", "'c b a'"), ("''", "''")]),
    ("count_vowels", "(s):\n    return sum(c in 'aeiou' for c in s.lower())", [("'Hello'", "2"), ("'xyz'", "0")]),
    ("flatten", "(xs):\n    out = []\n    for x in xs:\n        out.extend(flatten(x) if isinstance(x, list) else [x])\n    return out", [("[1, [2, [3, []]]]", "[1, 2, 3]")]),
    ("merge", "(a, b):\n    return {**a, **b}", [("{1: 2}, {3: 4}", "{1: 2, 3: 4}"), ("{}, {'a': None}", "{'a': None}")]),
    ("min_max", "(xs):\n    return min(xs), max(xs)", [("[3, 1, 2]", "(1, 3)")]),
    ("unique", "(xs):\n    return set(xs)", [("[1, 1, 2]", "{1, 2}")]),
    ("frozen", "(xs):\n    return frozenset(xs)", [("'abca'", "frozenset('abc')")]),
    ("mean", "(xs):\n    return sum(xs) / len(xs)", [("[1, 2, 3, 4]", "2.5")]),
    ("transpose", "(m):\n    return [list(r) for r in zip(*m)]", [("[[1, 2], [3, 4]]", "[[1, 3], [2, 4]]")]),
    ("encode", "(s):\n    return s.encode('utf-8')", [("'é'", "b'\\xc3\\xa9'")]),
    ("binary", "(n):\n    return bin(n)[2:]", [("10", "'1010'")]),
    ("factorial_of", "(n):\n    return 1 if n < 2 else n * factorial_of(n - 1)", [("5", "120"), ("30", "265252859812191058636308480000000")]),
    ("palindrome", "(s):\n    t = [c.lower() for c in s if c.isalnum()]\n    return t == t[::-1]", [("'A man, a plan, a canal: Panama'", "True"), ("'ab'", "False")]),
    ("nothing", "(x):\n    return None", [("1", "None")]),
    ("rotate", "(xs, k):\n    k %= len(xs) or 1\n    return xs[-k:] + xs[:-k]", [("[1, 2, 3], 1", "[3, 1, 2]"), ("[], 3", "[]")]),
    ("letters", "(s):\n    d = {}\n    for c in s:\n        d[c] = d.get(c, 0) + 1\n    return d", [("'aab'", "{'a': 2, 'b': 1}")]),
    ("collatz", "(n):\n    steps = 0\n    while n != 1:\n        n = n // 2 if n % 2 == 0 else 3 * n + 1\n        steps += 1\n    return steps", [("27", "111")]),
    ("digits_of", "(n):\n    return [int(c) for c in str(abs(n))]", [("-305", "[3, 0, 5]")]),
    ("two_sum", "(xs, t):\n    seen = {}\n    for i, x in enumerate(xs):\n        if t - x in seen:\n            return [seen[t - x], i]\n        seen[x] = i", [("[2, 7, 11], 9", "[0, 1]"), ("[1], 5", "None")]),
    ("brackets", "(s):\n    st = []\n    for c in s:\n        if c in '([{':\n            st.append(c)\n        elif not st or '([{'.index(st.pop()) != ')]}'.index(c):\n            return False\n    return not st", [("'([]){}'", "True"), ("'(]'", "False")]),
    ("hanoi", "(n, a='A', b='B', c='C'):\n    return hanoi(n - 1, a, c, b) + [(a, c)] + hanoi(n - 1, b, a, c) if n else []", [("2", "[('A', 'B'), ('A', 'C'), ('B', 'C')]")]),
    ("square_root", "(x):\n    y = x\n    for _ in range(60):\n        y = (y + x / y) / 2\n    return y", [("9.0", "3.0")]),
    ("power_set", "(xs):\n    return [[x for i, x in enumerate(xs) if m >> i & 1] for m in range(1 << len(xs))]", [("[1, 2]", "[[], [1], [2], [1, 2]]")]),
    ("caesar", "(s, k):\n    return ''.join(chr((ord(c) - 97 + k) % 26 + 97) if c.islower() else c for c in s)", [("'xyz!', 3", "'abc!'")]),
    ("complex_sum", "(xs):\n    return sum(xs, 0j)", [("[1, 2j]", "(1+2j)")]),
    ("span", "(a, b):\n    return range(a, b, 2)", [("1, 6", "range(1, 6, 2)")]),
    ("infinite", "():\n    return float('inf'), -0.0", [("", "(float('inf'), 0.0)")]),
    ("huge", "(n):\n    return 7 ** n", [("20000", "7 ** 20000")]),
    ("unicode_text", "(s):\n    return s + '\\u2603\\ud800'", [("'😀'", "'😀\\u2603\\ud800'")]),
    ("nested", "():\n    return {'a': [1, (2, {3}), {'b': None}], (1, 2): b'x'}", [("", "{'a': [1, (2, {3}), {'b': None}], (1, 2): b'x'}")]),
    ("matrix_product", "(a, b):\n    return [[sum(x * y for x, y in zip(r, c)) for c in zip(*b)] for r in a]", [("[[1, 2]], [[3], [4]]", "[[11]]")]),
    ("longest_word", "(s):\n    return max(s.split(), key=len, default='')", [("'a bbb cc'", "'bbb'"), ("''", "''")]),
    ("gray_code", "(n):\n    return [i ^ i >> 1 for i in range(1 << n)]", [("2", "[0, 1, 3, 2]")]),
    ("edit_distance", "(a, b):\n    d = list(range(len(b) + 1))\n    for i, x in enumerate(a, 1):\n        p, d[0] = d[0], i\n        for j, y in enumerate(b, 1):\n            p, d[j] = d[j], min(d[j] + 1, d[j - 1] + 1, p + (x != y))\n    return d[-1]", [("'kitten', 'sitting'", "3")]),
    ("roman", "(n):\n    out = ''\n    for v, s in ((1000, 'M'), (900, 'CM'), (500, 'D'), (400, 'CD'), (100, 'C'), (90, 'XC'), (50, 'L'), (40, 'XL'), (10, 'X'), (9, 'IX'), (5, 'V'), (4, 'IV'), (1, 'I')):\n        while n >= v:\n            out += s\n            n -= v\n    return out", [("1994", "'MCMXCIV'")]),
    ("with_defaults", "(a, *rest, key=3, **named):\n    return a, rest, key, named", [("1, 2, 3, key=4, z=5", "(1, (2, 3), 4, {'z': 5})")]),
    ("bisect_root", "(k):\n    lo, hi = 0, k\n    while lo < hi:\n        mid = (lo + hi + 1) // 2\n        if mid * mid <= k:\n            lo = mid\n        else:\n            hi = mid - 1\n    return lo", [("10**12", "10**6")]),
]

LIBRARY: list[tuple[str, str, list[str]]] = [
    (name, source, tests)
    for name, source, *tests in [
        ("counter", "from collections import Counter\ndef f(s): return Counter(s)", "assert f('aab') == {'a': 2, 'b': 1}", "assert f('ab').most_common(1) == [('a', 1)]"),
        ("deque", "from collections import deque\ndef f(n): return deque(range(n), maxlen=3)", "assert list(f(5)) == [2, 3, 4] and f(2).maxlen == 3"),
        ("defaultdict", "from collections import defaultdict\ndef f(ws):\n    d = defaultdict(list)\n    for w in ws: d[len(w)].append(w)\n    return d", "assert f(['a', 'bb', 'c']) == {1: ['a', 'c'], 2: ['bb']}"),
        ("ordered", "from collections import OrderedDict\ndef f(): return OrderedDict(b=1, a=2)", "assert list(f()) == ['b', 'a']"),
        ("namedtuple", "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(): return P(1, y=2)", "assert f() == (1, 2) and f().y == 2", "assert P(3, 4)._replace(x=0) == (0, 4)"),
        ("typed_tuple", "from typing import NamedTuple\nclass P(NamedTuple):\n    x: int\n    def twice(self): return self.x * 2\ndef f(): return P(4)", "assert f() == (4,) and f().x == 4 and f().twice() == 8"),
        ("decimal", "from decimal import Decimal\ndef f(a): return Decimal(a) * 3", "from decimal import Decimal\nassert f('0.1') == Decimal('0.3')"),
        ("fraction", "from fractions import Fraction\ndef f(a, b): return Fraction(a, b)", "assert f(2, 4) == Fraction(1, 2)"),
        ("dates", "import datetime as dt\ndef f(d): return d + dt.timedelta(days=1)", "import datetime\nassert f(datetime.date(2024, 2, 28)) == datetime.date(2024, 2, 29)", "assert f(datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone.utc)).tzinfo is not None"),
        ("heap", "import heapq\ndef f(xs, k): return heapq.nsmallest(k, xs)", "assert f([3, 1, 2], 2) == [1, 2]"),
        ("regex", "import re\ndef f(s): return re.findall(r'\\d+', s)", "assert f('a1b22') == ['1', '22']"),
        ("match", "import re\ndef f(s): return re.match(r'(\\w)(\\w)', s)", "assert f('ab').group(2) == 'b' and f('') is None and f('xy')[1] == 'x'"),
        ("itertools", "import itertools\ndef f(xs): return itertools.accumulate(xs)", "assert list(f([1, 2, 3])) == [1, 3, 6]"),
        ("lru_cache", "from functools import lru_cache\n@lru_cache(None)\ndef f(n): return n if n < 2 else f(n - 1) + f(n - 2)", "assert f(80) == 23416728348467685", "f.cache_clear()\nassert f(3) == 2"),
        ("reduce", "from functools import reduce\ndef f(xs): return reduce(lambda a, b: a * b, xs, 1)", "assert f([2, 3, 4]) == 24"),
        ("partial", "from functools import partial\ndouble = partial(lambda a, b: a * b, 2)", "assert double(4) == 8"),
        ("json", "import json\ndef f(x): return json.dumps(x, sort_keys=True)", "assert f({'b': 1, 'a': [None, True]}) == '{\"a\": [null, true], \"b\": 1}'"),
        ("math", "import math\ndef area(r): return math.pi * r ** 2", "assert math.isclose(area(2), 12.566, rel_tol=1e-3)", "assert abs(area(1) - 3.14159) < 1e-4 and round(area(1), 2) == 3.14"),
        ("thread", "def f(x): return 2 * x", "import threading\nmade = []\nt = threading.Thread(target=lambda: made.append(f(3)))\nt.start()\nt.join()\nassert made == [6]"),
        ("statistics", "import statistics\ndef f(xs): return statistics.median(xs)", "assert f([3, 1, 2]) == 2"),
        ("random", "import random\ndef f(seed): return random.Random(seed).sample(range(9), 3)", "assert f(4) == f(4) and len(set(f(4))) == 3"),
        ("string_io", "import io\ndef f(lines):\n    out = io.StringIO()\n    print(*lines, sep='\\n', file=out)\n    return out.getvalue()", "assert f(['a', 'b']) == 'a\\nb\\n'"),
        ("hash", "import hashlib\ndef f(s): return hashlib.sha256(s.encode()).hexdigest()", "assert f('')[:8] == 'e3b0c442'"),
        ("bisect", "import bisect\ndef f(xs, x):\n    bisect.insort(xs, x)\n    return xs", "xs = [1, 3]\nassert f(xs, 2) is xs and xs == [1, 2, 3]"),
        ("copy", "import copy\ndef f(x): return copy.deepcopy(x)", "a = [[1]]\nb = f(a)\nb[0].append(2)\nassert a == [[1]] and b == [[1, 2]]"),
        ("threads", "import threading\ndef f(n):\n    out = []\n    ts = [threading.Thread(target=out.append, args=(i,)) for i in range(n)]\n    for t in ts: t.start()\n    for t in ts: t.join()\n    return sorted(out)", "assert f(5) == [0, 1, 2, 3, 4]"),
        ("files", "import os, tempfile\ndef f(text):\n    with tempfile.TemporaryDirectory() as d:\n        p = os.path.join(d, 'x')\n        with open(p, 'w') as h: h.write(text)\n        return open(p).read()", "assert f('hi') == 'hi'"),
        ("subprocess", "import subprocess, sys\ndef f(): return subprocess.run([sys.executable, '-c', 'print(5)'], capture_output=True, text=True).stdout", "assert f() == '5\\n'"),
        ("pool", "from concurrent.futures import ThreadPoolExecutor\ndef f(xs):\n    with ThreadPoolExecutor(2) as p: return list(p.map(abs, xs))", "assert f([-1, 2]) == [1, 2]"),
        ("slow", "import time\ndef f():\n    time.sleep(0.3)\n    return sum(i * i for i in range(200000))", "assert f() == 2666646666700000"),
        ("array", "from array import array\ndef f(): return array('i', [1, 2])", "assert list(f()) == [1, 2] and f()[1] == 2 and len(f()) == 2"),
        ("views", "def f(d): return d.keys(), d.values(), d.items()", "assert list(f({1: 2})[0]) == [1] and set(f({1: 2})[2]) == {(1, 2)}"),
        ("map", "def f(xs): return map(str, xs)", "assert list(f([1, 2])) == ['1', '2']", "assert ' '.join(f([1])) == '1'"),
        ("generator", "def f(n):\n    i = 0\n    while i < n:\n        yield i\n        i += 1", "assert list(f(3)) == [0, 1, 2] and sum(f(4)) == 6", "g = f(2)\nassert next(g) == 0 and next(g) == 1 and next(g, None) is None"),
        ("endless", "def f():\n    n = 1\n    while True:\n        yield n\n        n *= 2", "g = f()\nassert [next(g) for _ in range(4)] == [1, 2, 4, 8]"),
        ("closure", "def make():\n    n = 0\n    def up():\n        nonlocal n\n        n += 1\n        return n\n    return up", "c = make()\nc()\nassert c() == 2 and make()() == 1"),
        ("curry", "def add(a): return lambda b: lambda c: a + b + c", "assert add(1)(2)(3) == 6"),
        ("compose", "def compose(*fs):\n    def run(x):\n        for f in reversed(fs): x = f(x)\n        return x\n    return run", "assert compose(lambda x: x + 1, lambda x: x * 2)(5) == 11", "assert compose(str, abs)(-3) == '3'"),
        ("decorator", "import functools\ndef twice(f):\n    @functools.wraps(f)\n    def w(*a, **k): return f(*a, **k) * 2\n    return w", "@twice\ndef g(x):\n    'doc'\n    return x + 1\nassert g(1) == 4 and g.__name__ == 'g'"),
        ("key", "def order(xs, key=None, reverse=False): return sorted(xs, key=key, reverse=reverse)", "assert order(['bb', 'a'], key=len) == ['a', 'bb']", "assert order([1, 2], key=lambda x: -x) == [2, 1]", "assert order([('a', 2), ('b', 1)], key=lambda p: p[1])[0] == ('b', 1)"),
        ("callback", "def each(xs, do):\n    for x in xs: do(x)", "out = []\neach([1, 2], out.append)\nassert out == [1, 2]", "seen = {}\neach('ab', lambda c: seen.update({c: 1}))\nassert seen == {'a': 1, 'b': 1}"),
        ("iterator_in", "def total(it): return sum(it)", "assert total(x for x in [1, 2, 3]) == 6 and total(iter([4])) == 4"),
        ("in_place", "def sort_in_place(a): a.sort()", "a = [3, 1]\nsort_in_place(a)\nassert a == [1, 3]"),
        ("in_place_nested", "def fill(m):\n    for row in m:\n        row[:] = [0] * len(row)\n    m.append([9])", "m = [[1, 2], [3]]\nr = m[0]\nfill(m)\nassert m == [[0, 0], [0], [9]] and r == [0, 0]"),
        ("in_place_dict", "def drop(d, s):\n    d.pop('a')\n    s.add(3)\n    d['z'] = s", "d, s = {'a': 1}, {1}\ndrop(d, s)\nassert d == {'z': {1, 3}} and d['z'] is s"),
        ("raises", "def f(x):\n    if x < 0: raise ValueError('negative')\n    return x", "try:\n    f(-1)\n    assert False\nexcept ValueError as e:\n    assert str(e) == 'negative'"),
        ("own_error", "class Poor(Exception):\n    def __init__(self, need):\n        super().__init__(f'need {need}')\n        self.need = need\nclass Broke(Poor): pass\ndef pay(n): raise Broke(n)", "try:\n    pay(3)\n    assert False\nexcept Poor as e:\n    assert e.need == 3 and str(e) == 'need 3' and isinstance(e, Broke)"),
        ("key_error", "def f(d): return d['x']", "import unittest\nwith unittest.TestCase().assertRaises(KeyError):\n    f({})"),
        ("exits", "import sys\ndef f(): sys.exit(3)", "try:\n    f()\n    assert False\nexcept SystemExit as e:\n    assert e.code == 3"),
        ("async", "import asyncio\nasync def f(x):\n    await asyncio.sleep(0)\n    return x + 1", "import asyncio\nassert asyncio.run(f(1)) == 2"),
        ("context", "from contextlib import contextmanager\nlog = []\n@contextmanager\ndef opened():\n    log.append('in')\n    yield 5\n    log.append('out')", "with opened() as v:\n    assert v == 5\nassert log == ['in', 'out']"),
        ("constants", "LIMIT = 10\nNAMES = ('a', 'b')\ndef f(): return LIMIT", "assert f() == LIMIT == 10 and NAMES[1] == 'b'"),
        ("globals", "calls = 0\ndef f():\n    global calls\n    calls += 1", "f()\nf()\nassert calls == 2"),
        ("prints", "print('loading')\nimport sys\nsys.stderr.write('warning\\n')\ndef f(x):\n    print('x' * 1000)\n    return x", "assert f(3) == 3 and f(None) is None"),
        ("main_guard", "def f(x): return x\nif __name__ == '__main__':\n    print(f(1))", "assert f(2) == 2"),
        ("deep_recursion", "def f(n): return 0 if n == 0 else 1 + f(n - 1)", "assert f(950) == 950"),
        ("recursion_limit", "import sys\nsys.setrecursionlimit(10000)\ndef f(n): return 0 if n == 0 else 1 + f(n - 1)", "assert f(5000) == 5000"),
        ("shadows_sum", "def sum(a, b): return a + b", "assert sum(10, 15) == 25"),
        ("shadows_gcd", "def gcd(a, b): return a if not b else gcd(b, a % b)", "assert gcd(12, 18) == 6"),
        ("shadows_max", "def max(xs):\n    best = xs[0]\n    for x in xs:\n        if x > best: best = x\n    return best", "assert max([1, 3, 2]) == 3"),
        ("helpers", "def _half(n): return n // 2\ndef _odd(n): return n % 2\ndef popcount(n): return n and _odd(n) + popcount(_half(n))", "assert popcount(255) == 8"),
        ("lambda", "square = lambda x: x * x", "assert [square(i) for i in range(3)] == [0, 1, 4] and list(map(square, [5])) == [25]"),
        ("walrus", "def f(xs): return [y for x in xs if (y := x * 2) > 2]", "assert f([1, 2]) == [4]"),
        ("matching", "def f(p):\n    match p:\n        case (0, y): return y\n        case {'k': v}: return v\n        case _: return None", "assert f((0, 3)) == 3 and f({'k': 4}) == 4 and f(1) is None"),
        ("annotations", "from __future__ import annotations\nfrom typing import Dict, List, Optional, Tuple, Union\ndef f(x: List[int], y: Optional[Dict[str, Tuple[int, ...]]] = None) -> Union[int, str]: return sum(x)", "assert f([1, 2]) == 3"),
        ("unit_tests", "def add(a, b): return a + b", "import unittest\nclass T(unittest.TestCase):\n    def test_add(self):\n        self.assertEqual(add(1, 2), 3)\n        self.assertAlmostEqual(add(0.1, 0.2), 0.3)\n        self.assertIn(add(1, 1), [2])\nif __name__ == '__main__':\n    unittest.main()"),
        ("loops", "def f(a, b): return a * b", "for a in range(5):\n    for b in range(5):\n        assert f(a, b) == a * b"),
        ("nodes", "def total(node):\n    s = 0\n    while node:\n        s += node.val\n        node = node.next\n    return s", "class Node:\n    def __init__(self, val, next=None):\n        self.val, self.next = val, next\nassert total(Node(1, Node(2, Node(3)))) == 6"),
        ("reverse_nodes", "def rev(head):\n    prev = None\n    while head:\n        head.next, prev, head = prev, head, head.next\n    return prev", "class Node:\n    def __init__(self, val, next=None):\n        self.val, self.next = val, next\nh = rev(Node(1, Node(2)))\nassert h.val == 2 and h.next.val == 1 and h.next.next is None"),
    ]
]

CLASSES: list[tuple[str, str, list[str]]] = [
    (name, source, tests)
    for name, source, *tests in [
        ("stack", "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n    def pop(self):\n        if not self.items: raise IndexError('empty')\n        return self.items.pop()\n    def __len__(self): return len(self.items)\n    def __bool__(self): return bool(self.items)", "s = Stack()\nassert not s\ns.push(1)\ns.push('a')\nassert len(s) == 2 and s.pop() == 'a' and s.items == [1] and s", "try:\n    Stack().pop()\n    assert False\nexcept IndexError:\n    pass"),
        ("solution", "class Solution:\n    def twoSum(self, nums, target):\n        return next([i, j] for i in range(len(nums)) for j in range(i) if nums[i] + nums[j] == target)", "assert sorted(Solution().twoSum([2, 7, 11], 9)) == [0, 1]"),
        ("lru", "from collections import OrderedDict\nclass LRUCache:\n    def __init__(self, n): self.n, self.d = n, OrderedDict()\n    def get(self, k):\n        if k not in self.d: return -1\n        self.d.move_to_end(k)\n        return self.d[k]\n    def put(self, k, v):\n        self.d[k] = v\n        self.d.move_to_end(k)\n        if len(self.d) > self.n: self.d.popitem(last=False)", "c = LRUCache(1)\nc.put(1, 1)\nc.put(2, 2)\nassert c.get(1) == -1 and c.get(2) == 2"),
        ("vector", "class V:\n    def __init__(self, x, y): self.x, self.y = x, y\n    def __add__(self, o): return V(self.x + o.x, self.y + o.y)\n    def __mul__(self, k): return V(self.x * k, self.y * k)\n    __rmul__ = __mul__\n    def __eq__(self, o): return isinstance(o, V) and (self.x, self.y) == (o.x, o.y)\n    def __hash__(self): return hash((self.x, self.y))\n    def __abs__(self): return (self.x ** 2 + self.y ** 2) ** 0.5\n    def __repr__(self): return f'V({self.x}, {self.y})'", "assert V(1, 2) + V(3, 4) == V(4, 6) and V(1, 2) != V(2, 1)", "assert (V(1, 2) * 3).x == 3 and (2 * V(1, 2)).y == 4 and repr(V(1, 2) * 3) == 'V(3, 6)'", "assert abs(V(3, 4)) == 5 and len({V(1, 1), V(1, 1)}) == 1"),
        ("dataclass", "from dataclasses import dataclass, field\n@dataclass(order=True)\nclass P:\n    x: int\n    y: int = 0\n    tags: list = field(default_factory=list)", "assert P(1) == P(1, 0) and P(1) < P(2) and str(P(1)) == 'P(x=1, y=0, tags=[])'", "p = P(1)\np.y = 4\np.tags.append(3)\nassert p.y == 4"),
        ("frozen_dataclass", "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass P:\n    x: int", "try:\n    P(1).x = 2\n    assert False\nexcept AttributeError:\n    pass", "assert {P(1): 'a'}[P(1)] == 'a'"),
        ("enum", "from enum import Enum, IntEnum\nclass Color(Enum):\n    RED = 1\n    BLUE = 2\nclass Level(IntEnum):\n    LOW = 1\ndef f(): return Color.RED", "assert f() is Color.RED and f() == Color.RED and f().name == 'RED' and Color(2) is Color.BLUE", "assert [c.value for c in Color] == [1, 2] and Color['BLUE'].value == 2 and Level.LOW == 1 and Level.LOW.name == 'LOW'"),
        ("inheritance", "from abc import ABC, abstractmethod\nclass Shape(ABC):\n    @abstractmethod\n    def area(self): ...\nclass Square(Shape):\n    def __init__(self, a): self.a = a\n    def area(self): return self.a ** 2", "s = Square(3)\nassert s.area() == 9 and isinstance(s, Shape) and issubclass(Square, Shape)", "try:\n    Shape()\n    assert False\nexcept TypeError:\n    pass"),
        ("properties", "class T:\n    count = 0\n    def __init__(self): T.count += 1; self._c = 0\n    @property\n    def f(self): return self._c * 1.8 + 32\n    @f.setter\n    def f(self, v): self._c = (v - 32) / 1.8\n    @staticmethod\n    def s(x): return x + 1\n    @classmethod\n    def make(cls): return cls()", "t = T()\nt.f = 212\nassert abs(t._c - 100) < 1e-9 and T.s(1) == 2 and T.make().f == 32 and T.count == 2"),
        ("singleton", "class S:\n    _one = None\n    def __new__(cls):\n        if cls._one is None: cls._one = super().__new__(cls)\n        return cls._one", "assert S() is S()"),
        ("iterable", "class Down:\n    def __init__(self, n): self.n = n\n    def __iter__(self): return self\n    def __next__(self):\n        if self.n <= 0: raise StopIteration\n        self.n -= 1\n        return self.n", "assert list(Down(3)) == [2, 1, 0] and sum(x for x in Down(3)) == 3 and max(Down(4)) == 3"),
        ("sequence", "class Seq:\n    def __len__(self): return 3\n    def __getitem__(self, i):\n        if i >= 3: raise IndexError\n        return i * 10", "assert list(Seq()) == [0, 10, 20] and Seq()[1] == 10 and len(Seq()) == 3 and 20 in Seq()"),
        ("mapping", "class Grid:\n    def __init__(self): self.d = {}\n    def __setitem__(self, k, v): self.d[k] = v\n    def __getitem__(self, k): return self.d[k]\n    def __delitem__(self, k): del self.d[k]\n    def __contains__(self, k): return k in self.d", "g = Grid()\ng[1, 2] = 'x'\nassert g[1, 2] == 'x' and (1, 2) in g\ndel g[1, 2]\nassert (1, 2) not in g"),
        ("callable", "class Adder:\n    def __init__(self, n): self.n = n\n    def __call__(self, x): return self.n + x", "assert Adder(2)(3) == 5 and list(map(Adder(1), [1])) == [2]"),
        ("returned_linked_list", "class Links:\n    def __init__(self, xs): self.xs = list(xs)\n    def __iter__(self): return iter(self.xs)\n    def __len__(self): return len(self.xs)\n    def __getitem__(self, i): return self.xs[i]\n    def push(self, x): self.xs.append(x)\ndef build(xs): return Links(xs)\ndef grow(links): links.push(9)", "r = build([1, 2])\nassert len(r) == 2 and list(r) == [1, 2] and r[1] == 2 and r[-1] == 2 and r[1:] == [2] and 2 in r and list(reversed(r)) == [2, 1]\nr.push(3)\nassert len(r) == 3 and list(r) == [1, 2, 3] and r[2] == 3\ngrow(r)\nassert r[-1] == 9 and sum(r) == 15"),
        ("returned_growing_dict", "from collections import defaultdict\nclass Graph:\n    def __init__(self): self.adj = defaultdict(lambda: [])\n    def add(self, a, b): self.adj[a].append(b)\ndef empty(): return Graph()", "g = empty()\ng.add(1, 2)\nassert g.adj[1] == [2] and len(g.adj) == 1\ng.add(1, 3)\nassert g.adj[1] == [2, 3] and g.adj[7] == [] and len(g.adj) == 2"),
        ("returned_mapping", "class Sparse:\n    def __init__(self, d): self.d = dict(d)\n    def keys(self): return self.d.keys()\n    def __iter__(self): return iter(self.d)\n    def __len__(self): return len(self.d)\n    def __getitem__(self, k): return self.d[k]\n    def __setitem__(self, k, v): self.d[k] = v\ndef sparse(d): return Sparse(d)", "m = sparse({0: 5, 4: 6})\nassert m[0] == 5 and list(m) == [0, 4] and len(m) == 2 and dict(m) == {0: 5, 4: 6}\nm[9] = 1\nassert len(m) == 3 and m[9] == 1"),
        ("returned_matrix", "class M:\n    def __init__(self, rows): self.rows = rows\n    def __getitem__(self, ij): return self.rows[ij[0]][ij[1]]\n    def __len__(self): return len(self.rows)\n    def __mul__(self, k): return M([[k * x for x in row] for row in self.rows])\n    __rmul__ = __mul__\n    def __str__(self): return str(self.rows)\n    def turned(self): return M([list(c) for c in zip(*self.rows)])\ndef identity(n): return M([[int(i == j) for j in range(n)] for i in range(n)])", "m = identity(2)\nassert m[0, 0] == 1 and m[0, 1] == 0 and len(m) == 2\nassert (m * 3).rows == [[3, 0], [0, 3]]", "assert str(M([[1, 2]]).turned() * 2) == '[[2], [4]]'"),
        ("returned_iterator", "class Count:\n    def __init__(self): self.n = 0\n    def __iter__(self): return self\n    def __next__(self):\n        self.n += 1\n        return self.n\ndef upwards(): return Count()\ndef squares():\n    n = 0\n    while True:\n        yield n * n\n        n += 1", "c = upwards()\nassert next(c) == 1 and [x for x, _ in zip(c, range(2))] == [2, 3] and next(c) == 5", "s = squares()\nassert [next(s) for _ in range(3)] == [0, 1, 4]\nfor x in s:\n    break\nassert x == 9 and next(s) == 16"),
        ("returned_endless", "class Evens:\n    def __iter__(self):\n        n = 0\n        while True:\n            yield n\n            n += 2\n    def __getitem__(self, i): return 2 * i\ndef evens(): return Evens()", "import itertools\ne = evens()\nassert list(itertools.islice(e, 3)) == [0, 2, 4] and e[100] == 200 and list(itertools.islice(e, 2)) == [0, 2]"),
        ("returned_circle", "class Ring(list):\n    def __getitem__(self, i): return list.__getitem__(self, i % len(self))\ndef ring(xs): return Ring(xs)", "r = ring([1, 2, 3])\nassert r[1] == 2 and r[4] == 2 and len(r) == 3 and r.index(3) == 2 and r.count(1) == 1\nr.append(7)\nassert r == [1, 2, 3, 7] and r[3] == 7 and len(r) == 4"),
        ("returned_bag", "class Bag(dict):\n    def total(self): return sum(self.values())\n    def __missing__(self, k): return 0\ndef bag(text):\n    b = Bag()\n    for c in text: b[c] += 1\n    return b", "b = bag('abca')\nassert b['a'] == 2 and b['z'] == 0 and b.total() == 4 and b.get('b') == 1 and sorted(b.items()) == [('a', 2), ('b', 1), ('c', 1)] and sorted(b) == ['a', 'b', 'c']\nb['q'] = 5\nassert b.total() == 9 and 'q' in b"),
        ("returned_tree", "class Tree:\n    def __init__(self): self.xs = []\n    def add(self, x):\n        self.xs = sorted(self.xs + [x])\n        return self\n    def __iter__(self): yield from self.xs\n    def __len__(self): return len(self.xs)\n    def __contains__(self, x): return x in self.xs\n    def __bool__(self): return bool(self.xs)\ndef tree(*xs):\n    t = Tree()\n    for x in xs: t.add(x)\n    return t", "t = tree(3, 1)\nassert list(t) == [1, 3] and len(t) == 2 and 3 in t and 5 not in t and t\nassert list(t.add(2)) == [1, 2, 3] and len(t) == 3 and not tree()"),
        ("managed", "class Timer:\n    def __enter__(self): self.on = True; return self\n    def __exit__(self, *a): self.on = False", "with Timer() as t:\n    assert t.on\nassert not t.on"),
        ("list_subclass", "class L(list):\n    def first(self): return self[0]\ndef f(): return L([1, 2])", "assert f() == [1, 2] and f().first() == 1 and len(f()) == 2 and isinstance(f(), list) and f() + [3] == [1, 2, 3]"),
        ("dict_subclass", "class D(dict):\n    def __missing__(self, k): return k * 2", "d = D(a=1)\nassert d['a'] == 1 and d['b'] == 'bb' and d == {'a': 1}"),
        ("trie", "class Trie:\n    def __init__(self): self.w = set()\n    def insert(self, w): self.w.add(w)\n    def search(self, w): return w in self.w\n    def startswith(self, p): return any(w.startswith(p) for w in self.w)", "t = Trie()\nt.insert('apple')\nassert t.search('apple') and not t.search('app') and t.startswith('app') and not t.startswith('b')"),
        ("tree", "class Node:\n    def __init__(self, v, l=None, r=None): self.v, self.l, self.r = v, l, r\ndef depth(n): return 1 + max(depth(n.l), depth(n.r)) if n else 0\ndef walk(n):\n    if n:\n        yield from walk(n.l)\n        yield n.v\n        yield from walk(n.r)", "t = Node(2, Node(1), Node(3))\nassert depth(t) == 2 and list(walk(t)) == [1, 2, 3] and t.l.v == 1 and t.l.l is None"),
        ("money", "from functools import total_ordering\n@total_ordering\nclass M:\n    def __init__(self, c): self.c = c\n    def __eq__(self, o): return self.c == o.c\n    def __lt__(self, o): return self.c < o.c\n    def __neg__(self): return M(-self.c)\n    def __sub__(self, o): return M(self.c - o.c)\n    def __format__(self, s): return f'{self.c / 100:.2f}'", "assert M(1) < M(2) and M(3) >= M(3) and max(M(1), M(5)).c == 5 and (-M(2)).c == -2 and f'{M(250):x}' == '2.50'", "assert sorted([M(3), M(1)])[0].c == 1 and (M(3) - M(1)).c == 2"),
        ("pairs_in", "class Pair:\n    def __init__(self, a, b): self.a, self.b = a, b\ndef longest(ps):\n    best = [1] * len(ps)\n    for i, p in enumerate(ps):\n        for j in range(i):\n            if ps[j].b < p.a: best[i] = max(best[i], best[j] + 1)\n    return max(best)", "assert longest([Pair(5, 24), Pair(15, 25), Pair(27, 40), Pair(50, 60)]) == 3"),
        ("matrix", "class Matrix:\n    def __init__(self, rows): self.rows = rows\n    def __matmul__(self, o): return Matrix([[sum(a * b for a, b in zip(r, c)) for c in zip(*o.rows)] for r in self.rows])\n    def __getitem__(self, i): return self.rows[i]\n    def __str__(self): return '\\n'.join(' '.join(map(str, r)) for r in self.rows)", "m = Matrix([[1, 2], [3, 4]]) @ Matrix([[0, 1], [1, 0]])\nassert m[0] == [2, 1] and str(m) == '2 1\\n4 3' and m.rows == [[2, 1], [4, 3]]"),
    ]
]

STDIN: list[tuple[str, list[tuple[str, str]]]] = [
    ("print(sum(map(int, input().split())))", [("1 2 3\n", "6"), ("-1 1", "0\n")]),
    ("import sys\nfor line in sys.stdin:\n    print(line.strip()[::-1])", [("ab\ncd\n", "ba\ndc")]),
    ("n = int(input())\nprint(*range(n), sep=',')", [("3", "0,1,2")]),
    ("import sys\ndata = sys.stdin.read().split()\nprint(max(data, key=len))", [("a bbb cc", "bbb")]),
    ("def main():\n    a, b = map(int, input().split())\n    print(a * b)\nif __name__ == '__main__':\n    main()", [("6 7", "42")]),
    ("try:\n    while True: print(input().upper())\nexcept EOFError: pass", [("a\nb", "A\nB\n")]),
    ("import sys\nsys.setrecursionlimit(10**5)\ndef f(n): return 1 if n == 0 else f(n - 1) + 1\nprint(f(int(input())))", [("3000", "3001")]),
    ("import sys\nsys.stdout.write('%.3f\\n' % (1 / int(input())))", [("3", "0.333")]),
]

AS_PEOPLE_WRITE: list[tuple[str, Any]] = [
    ("def f(x):\n    return x * 2", "import random\nrandom.seed(0)\n\ndef test_f():\n    assert f(2) == 4\n"),
    ("def f(x):\n    return x * 2", ["import random\nrandom.seed(0)", "def test_f():\n    assert f(2) == 4", "async def test_g():\n    assert f(3) == 6"]),
    ("def f(x):\n    return x * 2", "class TestF:\n    def setup_method(self): self.n = 2\n    def test_f(self): assert f(self.n) == 4"),
    ("def f(x):\n    return x * 2", "if True:\n    def test_f(): assert f(2) == 4\ntry:\n    import nothing\nexcept ImportError: nothing = None"),
    ("def f(x):\n    return x * 2", "from unittest import TestCase\nclass T(TestCase):\n    def test(self): self.assertEqual(f(2), 4)"),
    ("def f(x):\n    return x * 2", "import unittest\nclass Base(unittest.TestCase):\n    def setUp(self): self.n = 2\nclass T(Base):\n    def test(self): self.assertEqual(f(self.n), 4)"),
    ("def compress(s):\n    import itertools\n    return ''.join(k + str(len(list(g))) for k, g in itertools.groupby(s))\ndef decompress(s):\n    return ''.join(a * int(b) for a, b in zip(s[::2], s[1::2]))", ["assert compress('aaab') == 'a3b1'", "assert decompress('a3b1') == 'aaab'"]),
    ("def gcd(a, b):\n    while b: a, b = b, a % b\n    return a\ndef reduce_fraction(a, b):\n    return a // gcd(a, b), b // gcd(a, b)", ["assert gcd(12, 18) == 6", "assert reduce_fraction(2, 4) == (1, 2)"]),
    ("import math\ndef half(x):\n    return x / 2", ["assert isclose(half(3), 1.5)", "r = half(5)\nassert isclose(r, 2.5)"]),
    ("def g(x):\n    return x + 1", ["from concurrent.futures import ThreadPoolExecutor\nassert list(ThreadPoolExecutor(4).map(g, range(50))) == list(range(1, 51))"]),
    ("class C:\n    def __init__(self):\n        import threading\n        self.n, self.lock = 0, threading.Lock()\n    def up(self):\n        with self.lock: self.n += 1", ["import threading\nc = C()\nts = [threading.Thread(target=lambda: [c.up() for _ in range(20)]) for _ in range(3)]\nfor t in ts: t.start()\nfor t in ts: t.join()\nassert c.n == 60"]),
    ("class V:\n    def __init__(self, x, y): self.x, self.y = x, y\n    def __mul__(self, k): return V(self.x * k, self.y * k)\n    def __eq__(self, o): return (self.x, self.y) == (o.x, o.y)\n    def __getitem__(self, i): return (self.x, self.y)[i]\n    def __iter__(self): return iter((self.x, self.y))\n    def __sub__(self, o): return V(self.x - o.x, self.y - o.y)\n    def __abs__(self): return (self.x ** 2 + self.y ** 2) ** 0.5", ["v = V(1, 2) * 3\nassert v == V(3, 6) and v.x == 3 and v[1] == 6 and list(v) == [3, 6]", "assert abs(V(3, 4) - V(0, 0)) == 5"]),
    ("class Node:\n    def __init__(self, val): self.val, self.next = val, None\ndef chain(xs):\n    head = None\n    for x in reversed(xs):\n        node = Node(x)\n        node.next, head = head, node\n    return head", ["n = chain([1, 2])\nassert n.val == 1 and n.next.val == 2 and n.next.next is None\nn.val = 7\nassert n.val == 7"]),
    ("def reverse(head):\n    out = None\n    while head:\n        head.next, out, head = out, head, head.next\n    return out", ["class ListNode:\n    next = None\n    def __init__(self, val, next=None): self.val, self.next = val, next\n    def to_list(self): return [self.val, *(self.next.to_list() if self.next else [])]\nassert reverse(ListNode(1, ListNode(2))).to_list() == [2, 1]"]),
    ("n = int(input())\nprint('\\n'.join(map(str, range(n))))", [{"input": "200000", "output": "\n".join(map(str, range(200_000)))}]),
]

_STYLES = {
    "plain": "def {name}{rest}\n",
    "typed": "from __future__ import annotations\nfrom typing import *\nimport math, re, collections\n\ndef {name}{rest}\n",
    "logged": "import functools\n\ndef logged(function):\n    @functools.wraps(function)\n    def call(*args, **kwargs):\n        "
    "print('called', args)\n        return function(*args, **kwargs)\n    return call\n\n@logged\ndef {name}{rest}\nprint({name})\n",
    "inner": "def make():\n    def {name}{inner}\n    return {name}\n\n{name} = make()\n",
}


def solutions() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """A name, a program, and a row that the program solves."""
    for (name, rest, cases), (style, form) in itertools.product(FUNCTIONS, _STYLES.items()):
        source = form.format(name=name, rest=rest, inner=rest.replace("\n", "\n    "))
        asserts = [f"assert {name}({arguments}) == {value}" for arguments, value in cases]
        if style in ("typed", "inner"):
            checks = "\n".join(f"    assert candidate({arguments}) == {value}" for arguments, value in cases)
            yield f"{name}-{style}", source, {"tests": f"def check(candidate):\n{checks}\n", "entry_point": name}
        else:
            yield f"{name}-{style}", source, {"tests": asserts}
    for name, source, tests in LIBRARY + CLASSES:
        yield name, source, {"tests": tests}
    for i, (source, pairs) in enumerate(STDIN):
        yield f"stdin-{i}", source, {"tests": [{"input": given, "output": wanted} for given, wanted in pairs]}
    for i, (source, tests) in enumerate(AS_PEOPLE_WRITE):
        yield f"as-people-write-{i}", source, {"tests": tests}
