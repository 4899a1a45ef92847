package zmqecho

import (
	"path/filepath"
	"testing"

	"github.com/pebbe/zmq4"

	"lookaside/internal/leak"
)

func TestMain(m *testing.M) { leak.Main(m) }

func TestEcho(t *testing.T) {
	for _, c := range []struct{ replyBytes, want int }{{-1, 300}, {7, 7}} {
		dir := t.TempDir()
		in, out := "ipc://"+filepath.Join(dir, "in"), "ipc://"+filepath.Join(dir, "out")
		ready, done := make(chan struct{}), make(chan error, 1)
		go func() { done <- Serve(in, out, c.replyBytes, func() { close(ready) }) }()
		select {
		case <-ready:
		case err := <-done:
			t.Fatal(err)
		}
		ctx, err := zmq4.NewContext()
		if err != nil {
			t.Fatal(err)
		}
		push, _ := ctx.NewSocket(zmq4.PUSH)
		pull, _ := ctx.NewSocket(zmq4.PULL)
		if err := push.Connect(in); err != nil {
			t.Fatal(err)
		}
		if err := pull.Connect(out); err != nil {
			t.Fatal(err)
		}
		for _, size := range []int{300, 0} {
			if _, err := push.SendBytes(make([]byte, size), 0); err != nil {
				t.Fatal(err)
			}
			got, err := pull.RecvBytes(0)
			if err != nil {
				t.Fatal(err)
			}
			if size > 0 && len(got) != c.want {
				t.Fatalf("%d bytes, want %d", len(got), c.want)
			}
		}
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		push.Close()
		pull.Close()
		if err := ctx.Term(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestBadEndpoint(t *testing.T) {
	if err := Serve("nonsense", "nonsense", 1, func() {}); err == nil {
		t.Fatal("no error")
	}
}
