package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"lookaside/internal/leak"
)

func TestMain(m *testing.M) {
	for name, child := range children {
		if len(os.Args) > 1 && os.Args[1] == name {
			if err := child(os.Args[2:]); err != nil {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(1)
			}
			os.Exit(0)
		}
	}
	leak.Main(m)
}

// build makes the binary, in a directory for what a run leaves.
func build(t *testing.T) (dir, bin string) {
	dir, err := os.MkdirTemp("", "soak") // t.TempDir's names are too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	bin = filepath.Join(dir, "lookaside")
	if out, err := exec.Command("go", "build", "-o", bin,
		"lookaside/sidecar/cmd/lookaside").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return dir, bin
}

// A few seconds of it, so that it works when it is wanted for hours.
func TestSoak(t *testing.T) {
	dir, bin := build(t)
	s := newSoak(options{bin: bin, dir: dir, duration: 4 * time.Second, seed: 1, clients: 2,
		redis: "auto", s3: "../../.cache/tools/bin/versitygw"})
	s.run(context.Background())
	for _, p := range s.problems {
		t.Error(p)
	}
	t.Logf("%+v", s.summary())
	s.http.CloseIdleConnections()
}

// One attack, for a second, so that the suite works when it is wanted. Its bounds are not asked for
// here: a machine that is busy with other tests is late.
func TestAttack(t *testing.T) {
	_, bin := build(t)
	o := besiege(context.Background(),
		attacks[slices.IndexFunc(attacks,
			func(a *attack) bool { return a.name == "sessions-garbage" })], bin, time.Second)
	if o.Lookups == 0 || o.Peak.AnonBytes == 0 || o.Peak.Files == 0 || o.After.Goroutines == 0 ||
		o.Health == 0 {
		t.Errorf("something was not watched: %+v", o)
	}
	for _, p := range o.Problems {
		if !strings.Contains(p, "allowed are") && !strings.Contains(p, "no answer") {
			t.Error(p)
		}
	}
}
