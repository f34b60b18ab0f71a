"""A process that returns each ZeroMQ message to its sender until it is ended.

python -m …
"""

import zmq


def main() -> None:
    """Prints the address where it listens."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        print(f"tcp://127.0.0.1:{port}", flush=True)
        while True:
            router.send_multipart(router.recv_multipart())


if __name__ == "__main__":
    main()
