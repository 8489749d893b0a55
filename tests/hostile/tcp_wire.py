"""What crosses between the server of a TCP store and its clients, written down a second time.

The definition is core/src/store/tcp_protocol.h.
"""

import hashlib
import hmac
import struct

TOKEN = b"a token for these tests"
MAGIC = b"PHXTCPS2"
GREETING, VERDICT = len(MAGIC) + 64, 33
SET, GET, WAIT = 1, 2, 3
MAX_VALUE = 16 << 20


def proof(side, token, greeting, nonce):
    words = b"phalanx store " + side
    return hmac.new(
        token, words + greeting[8:40] + nonce + greeting[40:72] + struct.pack("<Q", len(token)), hashlib.sha256
    ).digest()


def request(op, key, number=1000, value=b""):
    body = struct.pack("<BqI", op, number, len(key)) + key + value
    return struct.pack("<I", len(body)) + body
