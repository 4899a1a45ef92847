// Soak runs real sidecars and clients against each other and kills them at random moments, for any
// length of time. It covers what the tests do in seconds, and faults that show only after hours. It
// prints the seed first and a summary as JSON at the end. It fails if a single loaded byte was
// wrong, a lease outlived its owner, a store did not check clean after a kill, or a sidecar ended
// by itself.
//
//	soak --bin bin/lookaside --duration 10m [--seed N] [--clients 4] [--json FILE]
//	     [--redis auto|never] [--s3 versitygw]
//
// Ctrl-C ends it early, with the audit and the summary.
//
// It can also attack. One sidecar after another is misused in one way for some seconds while a
// well-behaved client works. The memory, files, log and processor time that the sidecar takes are
// compared with bounds.
//
//	soak attack --bin bin/lookaside [--each 6s] [--only NAME,…] [--json FILE]
//	soak attack --list
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/pflag"
)

// children are the roles in which the program starts itself.
var children = map[string]func([]string) error{"client": clientMain, "victim": victimMain}

func main() {
	command, args := run, os.Args[1:]
	if len(args) > 0 {
		if child := children[args[0]]; child != nil {
			command, args = child, args[1:]
		} else if args[0] == "attack" {
			command, args = attackMain, args[1:]
		}
	}
	if err := command(args); err != nil {
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
	fs.Uint64Var(&o.seed, "seed", 0,
		"of what is done when; 0: a random one. What the processes make of it still depends on the machine")
	fs.IntVar(&o.clients, "clients", 4, "client processes")
	fs.StringVar(&o.redis, "redis", "auto",
		"auto: a tier on a redis-server of our own where that is installed; never")
	fs.StringVar(&o.s3, "s3", ".cache/tools/bin/versitygw",
		"the S3 server of a tier, a versitygw; none where this is not there")
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
		return fmt.Errorf("%d problems; logs and media are left in %s (replay: --seed %d)",
			len(sum.Problems), dir, o.seed)
	}
	return os.RemoveAll(dir)
}
