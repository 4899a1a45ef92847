package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"lookaside/internal/simulate"
	"lookaside/tiers/policy"
)

func newSimulate() *cobra.Command {
	var (
		capacities, policies []string
		format               string
		seed                 uint64
	)
	cmd := &cobra.Command{
		Use:   "simulate TRACE …",
		Short: "Replay request traces to see how many prefix blocks each eviction policy would hit",
		Long: `Replay request traces to see how many prefix blocks each eviction policy would hit at which
capacity.

A trace is a file of JSON objects, one a line, each with hash_ids: a list of whole numbers, one
for each block of the request's prompt, where equal beginnings of lists are equal prefixes. This
is the form in which Mooncake publishes traces; other fields are ignored. "-" is standard input.
Capacities are in those blocks, with k and m for thousands and millions.

The ratio is that of blocks that hit to all blocks: a block hits if it and all before it in its
request are held. What else a request has is stored after it.`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if format != "table" && format != "json" {
				return fmt.Errorf("--format %s: want table or json", format)
			}
			plan := simulate.Plan{Policies: policies, Seed: seed}
			if slices.Contains(policies, "all") {
				plan.Policies = policy.Names()
			}
			for _, name := range plan.Policies {
				if _, err := policy.New(name, policy.Options{}); err != nil || name == "" {
					return fmt.Errorf("--policy: no eviction policy %q: there are %s", name,
						strings.Join(policy.Names(), ", "))
				}
			}
			for _, text := range capacities {
				n, err := parseBlocks(text)
				if err != nil {
					return fmt.Errorf("--capacity: %w", err)
				}
				plan.Capacities = append(plan.Capacities, n)
			}
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			var err error
			if plan.Traces, err = readTraces(args, cmd.InOrStdin()); err != nil {
				return err
			}
			plan.Progress = progressTo(cmd.ErrOrStderr(), 5*time.Second)
			results, err := plan.Run(ctx)
			if errors.Is(err, context.Canceled) {
				return errors.New("interrupted")
			} else if err != nil {
				return err
			}
			if format == "json" {
				return printJSON(cmd.OutOrStdout(), simulate.NewReport(plan, results))
			}
			return simulateTable(cmd.OutOrStdout(), plan, results)
		},
	}
	f := cmd.Flags()
	f.StringSliceVar(&capacities, "capacity", []string{"500", "1k", "2k", "5k", "10k", "20k", "30k",
		"50k"}, "capacities in blocks")
	f.StringSliceVar(&policies, "policy", []string{"all"}, "policies: "+strings.Join(policy.Names(),
		", ")+", or all")
	f.StringVar(&format, "format", "table", "what to print: table or json")
	f.Uint64Var(&seed, "seed", 1, "seed of the policies' hash functions and samples")
	return cmd
}

// parseBlocks parses a capacity: 500, 10k, 2.5k, 1m.
func parseBlocks(text string) (int, error) {
	number, unit := strings.ToLower(strings.TrimSpace(text)), 1.0
	for suffix, size := range map[string]float64{"k": 1e3, "m": 1e6} {
		if rest, ok := strings.CutSuffix(number, suffix); ok {
			number, unit = rest, size
			break
		}
	}
	v, err := strconv.ParseFloat(number, 64)
	if n := v * unit; err == nil && n >= 1 && n <= policy.SlotMask && n == math.Trunc(n) {
		return int(n), nil
	}
	return 0, fmt.Errorf("%q: want a whole number of blocks from 1 to %d, such as 500 or 10k", text,
		policy.SlotMask)
}

// readTraces reads all traces side by side, "-" from stdin. Each has the name of its file.
func readTraces(paths []string, stdin io.Reader) ([]*simulate.Trace, error) {
	if i := slices.Index(paths, "-"); i >= 0 && slices.Contains(paths[i+1:], "-") {
		return nil, errors.New("standard input can be read once only")
	}
	traces, errs := make([]*simulate.Trace, len(paths)), make([]error, len(paths))
	var wg sync.WaitGroup
	for i, path := range paths {
		wg.Go(func() {
			if path == "-" {
				traces[i], errs[i] = simulate.Read("standard input", stdin)
				return
			}
			f, err := os.Open(path)
			if err != nil {
				errs[i] = err
				return
			}
			defer f.Close()
			if traces[i], errs[i] = simulate.Read(path, f); errs[i] == nil {
				traces[i].Name = strings.TrimSuffix(filepath.Base(path), filepath.Ext(path))
			}
		})
	}
	wg.Wait()
	return traces, errors.Join(errs...)
}

// progressTo returns a function that writes a line about long runs, at most one in every interval.
func progressTo(w io.Writer, every time.Duration) func(done float64) {
	var mu sync.Mutex
	begun, last := time.Now(), time.Now()
	return func(done float64) {
		mu.Lock()
		defer mu.Unlock()
		if now := time.Now(); now.Sub(last) >= every && done > 0 && done < 1 {
			last = now
			left := time.Duration(float64(now.Sub(begun)) * (1 - done) / done)
			fmt.Fprintf(w, "simulated %.0f %%, some %s left\n", 100*done, left.Round(time.Second))
		}
	}
}

// simulateTable prints a table for each trace and marks the best ratio of each capacity.
func simulateTable(w io.Writer, plan simulate.Plan, results []simulate.Result) error {
	for i, t := range plan.Traces {
		blocks, distinct := t.Blocks()
		if i > 0 {
			fmt.Fprintln(w)
		}
		fmt.Fprintf(w, "%s: %d requests, %d blocks, %d of them distinct; a cache that never evicts hits %.4f of them\n",
			t.Name, t.Requests(), blocks, distinct, t.Ceiling())
		of := results[i*len(plan.Policies)*len(plan.Capacities):][:len(plan.Policies)*len(
			plan.Capacities)]
		table := tabwriter.NewWriter(w, 0, 8, 2, ' ', tabwriter.AlignRight)
		fmt.Fprint(table, "blocks\t")
		for _, c := range plan.Capacities {
			fmt.Fprintf(table, "%s \t", simulate.FormatBlocks(c))
		}
		fmt.Fprintln(table)
		for k, name := range plan.Policies {
			fmt.Fprintf(table, "%s\t", name)
			for j := range plan.Capacities {
				hits, best := of[k*len(plan.Capacities)+j].Hits, 0
				for other := range plan.Policies {
					best = max(best, of[other*len(plan.Capacities)+j].Hits)
				}
				mark := " "
				if hits == best {
					mark = "*"
				}
				fmt.Fprintf(table, "%.4f%s\t", of[k*len(plan.Capacities)+j].Ratio(), mark)
			}
			fmt.Fprintln(table)
		}
		if err := table.Flush(); err != nil {
			return err
		}
	}
	return nil
}
