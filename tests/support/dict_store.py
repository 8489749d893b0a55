"""A store in this process, with the methods of torch.distributed.Store."""

import threading


class DictStore:
    """torch.distributed.Store's methods on a dict. May be used by several threads."""

    def __init__(self):
        self.values = {}
        self.changed = threading.Condition()

    def sees(self, key):
        return key in self.values

    def set(self, key, value):
        with self.changed:
            self.values[key] = value.encode() if isinstance(value, str) else bytes(value)
            self.changed.notify_all()

    def get(self, key):
        return self.values[key]

    def add(self, key, amount):
        with self.changed:
            total = int(self.values.get(key, b"0")) + amount
            self.values[key] = str(total).encode()
            self.changed.notify_all()
            return total

    def wait(self, keys, timeout):
        with self.changed:
            if not self.changed.wait_for(lambda: all(map(self.sees, keys)), timeout.total_seconds()):
                raise RuntimeError(f"wait timeout after {timeout}, keys: {keys}")

    def delete_key(self, key):
        with self.changed:
            return self.values.pop(key, None) is not None
