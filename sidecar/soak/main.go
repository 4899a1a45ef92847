// Soak runs real sidecars and clients against each other and kills them at random moments, for as long as one likes: what the tests do in
// seconds, and what only shows in hours. It prints the seed first, and last a summary as JSON; it fails if a single loaded byte was wrong, a lease
// outlived its owner, a store did not check clean after a kill, or a sidecar ended by itself.
//
//	soak --bin bin/lookaside --duration 10m [--seed N] [--clients 3] [--json FILE] [--redis auto|never]
//
// Ctrl-C ends it early, with the audit and the summary.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/spf13/pflag"
)

func main() {
	if len(os.Args) > 1 && os.Args[1] == "client" {
		if err := clientMain(os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, "soak client:", err)
			os.Exit(1)
		}
		return
	}
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "soak:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	var o options
	var jsonFile string
	fs := pflag.NewFlagSet("soak", pflag.ContinueOnError)
	fs.StringVar(&o.bin, "bin", "bin/lookaside", "the binary to soak")
	fs.DurationVar(&o.duration, "duration", 10*time.Minute, "how long")
	fs.Uint64Var(&o.seed, "seed", 0, "of what is done when; 0: a random one. What the processes make of it still depends on the machine")
	fs.IntVar(&o.clients, "clients", 3, "client processes")
	fs.StringVar(&o.redis, "redis", "auto", "auto: a tier on a redis-server of our own where that is installed; never")
	fs.StringVar(&jsonFile, "json", "", "also write the summary here")
	if err := fs.Parse(args); err != nil {
		return err
	}
	if o.seed == 0 {
		o.seed = rand.Uint64()>>1 | 1
	}
	fmt.Fprintf(os.Stderr, "soak: seed %d, %v\n", o.seed, o.duration)
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	dir, err := os.MkdirTemp("", "soak")
	if err != nil {
		return err
	}
	o.dir = dir
	s := newSoak(o)
	s.run(ctx)
	sum := s.summary()
	out, err := json.MarshalIndent(sum, "", "  ")
	if err != nil {
		return err
	}
	fmt.Println(string(out))
	if jsonFile != "" {
		if err := os.WriteFile(jsonFile, append(out, '\n'), 0o644); err != nil {
			return err
		}
	}
	if len(sum.Problems) > 0 {
		keep := filepath.Join(dir, "sidecar.log")
		return fmt.Errorf("%d problems; logs and media are left in %s (replay: --seed %d)", len(sum.Problems), filepath.Dir(keep), o.seed)
	}
	return os.RemoveAll(dir)
}

// tail is the last bytes of a file, for a report.
func tail(name string, n int64) string {
	f, err := os.Open(name)
	if err != nil {
		return err.Error()
	}
	defer f.Close()
	if info, err := f.Stat(); err == nil && info.Size() > n {
		_, _ = f.Seek(-n, io.SeekEnd)
	}
	b, _ := io.ReadAll(f)
	return string(b)
}
