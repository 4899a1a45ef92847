package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"lookaside/internal/leak"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "client" {
		if err := clientMain(os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	leak.Main(m)
}

// A few seconds of it, so that it works when it is wanted for hours.
func TestSoak(t *testing.T) {
	dir, err := os.MkdirTemp("", "soak") // t.TempDir's names are too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	bin := filepath.Join(dir, "lookaside")
	if out, err := exec.Command("go", "build", "-o", bin, "lookaside/sidecar/cmd/lookaside").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	s := newSoak(options{bin: bin, dir: dir, duration: 4 * time.Second, seed: 1, clients: 2, redis: "auto"})
	s.run(context.Background())
	for _, p := range s.problems {
		t.Error(p)
	}
	t.Logf("%+v", s.summary())
	s.http.CloseIdleConnections()
}
