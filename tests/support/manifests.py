"""Changed manifests of checkpoints: with the right digest, and with random or strange values."""

import copy
import hashlib
import json


def signed(text):
    """The bytes of a manifest: the JSON object, given as bytes or as a value, with the right digest."""
    text = text if isinstance(text, bytes) else json.dumps(text, separators=(",", ":")).encode()
    body = text.rstrip()[:-1]
    return body + b',"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'"}\n'


def unsigned(data):
    found = json.loads(data)
    del found["sha256"]
    return found


STRANGE = [
    None, True, False, 0, -1, 1, 2, 4095, 4096, 2**31, 2**32, 2**53 + 1, 2**62, 2**62 + 1, 2**63, 2**64, 10**40, -(10**40), 0.5, 1.0,
    -0.0, 1e300, float("nan"), float("inf"), "", "..", "/", "../../etc/passwd", "/etc/passwd", "rank0-0.records", "rank0-0.records\0",
    "rank0-0.records/..", "data-000000000000", "data-00000000000\n", "\ud800", "\u202e", "x" * 5000, [], [[]], {}, {"": 1}, [0] * 3000,
    {"$tensor": 0}, {"$tensor": -1}, {"$tensor": 10**9}, {"$tensor": True}, {"$array": 0}, {"$bytes": "!"}, {"$bytes": 5}, {"$tuple": 5},
    {"$dict": [[1]]}, {"$dict": [[[], 1]]}, {"$counter": [[1, "x"]]}, {"$float": "nan"}, {"$float": "1"}, {"$float": []}, {"$": 1},
    {"$call": "os.system"}, {"$tensor": 0, "x": 1}, {"__reduce__": ["os.system", "x"]},
]  # fmt: skip


def spots(value, found, depth=0):
    """Appends (container, key) to `found` for each item at any depth of a value."""
    if isinstance(value, (dict, list)):
        for key in value if isinstance(value, dict) else range(len(value)):
            found.append((value, key))
            spots(value[key], found, depth + 1)
    return found


def mutated(content, chance):
    """JSON bytes of a copy with one to three random changes."""
    content = copy.deepcopy(content)
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        if not content:
            break
        if chance.random() < 0.5:  # below a top-level key, all keys with equal chance
            key = chance.choice(list(content))
            inside = [(content, key), *spots(content[key], [])]
        else:
            inside = spots(content, [])
        where, key = chance.choice(inside)
        value, action = where[key], chance.randrange(9)
        if action == 0:
            del where[key]
        elif action == 1 and isinstance(where, list):
            where.insert(key, copy.deepcopy(value))
        elif action == 2 and isinstance(where, dict):
            where[chance.choice(["extra", "whole", "$tensor", "..", "", "step", key + "x"])] = copy.deepcopy(value)
        elif action == 3 and type(value) is int:
            where[key] = chance.choice([value + 1, value - 1, -value, value * 2, value + 4096, value * 1024, value << 40, float(value)])
        elif action == 4 and isinstance(where, list):
            other = chance.randrange(len(where))
            where[key], where[other] = where[other], where[key]
        elif action == 5 and isinstance(value, str) and value:
            where[key] = chance.choice([value[:-1], value + value, "../" + value, "/" + value, value + "\0", value.upper(), "é" + value[1:]])
        elif action == 6:
            where[key] = [value] if chance.random() < 0.5 else {"$tuple": [value]}
        elif action == 7:
            where[key] = copy.deepcopy(chance.choice(inside)[0])
            if where is where[key]:
                where[key] = 0
        else:
            where[key] = copy.deepcopy(chance.choice(STRANGE))
    try:
        text = json.dumps(content, separators=(",", ":")).encode("utf-8", "surrogatepass")
    except ValueError:  # circular
        return mutated(content={"format": 1}, chance=chance)
    if chance.random() < 0.05:
        key = chance.choice(["step", "folder", "files", "format"])
        text = text.replace(f'"{key}":'.encode(), f'"{key}":0,"{key}":'.encode(), 1)
    return text
