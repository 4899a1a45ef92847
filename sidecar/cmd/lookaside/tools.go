package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"lookaside/sidecar"
	"lookaside/sidecar/admin"
)

func newVersion() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version",
		Args:  cobra.NoArgs,
		Run: func(cmd *cobra.Command, _ []string) {
			fmt.Fprintln(cmd.OutOrStdout(), sidecar.VersionLine())
		},
	}
}

func newStatus() *cobra.Command {
	var c control
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show what a running sidecar holds and who uses it",
		Long: `Show what a running sidecar holds and who uses it. The first line says how it is.

Of the tokens of vLLM's requests that vLLM's own cache does not have, which are those asked for,

  found     were held by the sidecars of all ranks when vLLM decided what to load
  loaded    were loaded; the part of what is asked for that is loaded is what the cache is worth
  computed  were not loaded: not held, or not in time, or the load failed

Pages that lookups found count also where vLLM then had them itself or loaded nothing. Totals
are since the sidecar's start.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			client, err := c.client(cmd)
			if err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), 5*time.Second)
			defer cancel()
			st, err := statusOf(ctx, client)
			if err != nil {
				return err
			}
			return c.print(cmd, st, st.WriteTable)
		},
	}
	c.flags(cmd)
	return cmd
}

func newList() *cobra.Command {
	var c control
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List all sidecars of this host, and say how each is",
		Long: `List all sidecars of this host, and say how each is.

Those are found whose sockets are in this network namespace, wherever their directories are, and
those whose directories are beside runtime.dir. Sidecars of other users are named; only root can
ask them how they are. With --admin, those are listed that the sidecar there finds beside itself.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ask, err := c.hostStates(cmd)
			if err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), 5*time.Second)
			defer cancel()
			states, err := ask(ctx)
			if err != nil {
				return err
			}
			list := make([]admin.HostSidecar, len(states))
			for i, s := range states {
				list[i] = s.HostSidecar
			}
			return c.print(cmd, list, func(w io.Writer) error {
				return admin.WriteSidecars(w, list)
			})
		},
	}
	c.flags(cmd)
	return cmd
}

func newLookup() *cobra.Command {
	var (
		c    control
		p    prompt
		q    admin.Query
		file string
	)
	cmd := &cobra.Command{
		Use:   "lookup {a prefix}",
		Short: "Ask a running sidecar how much of a prompt it holds, as a scheduler would",
		Long: `Ask a running sidecar how much of a prompt it holds, over its real sockets, as a scheduler of
the engine would.

A worker of the engine must be connected: a worker is needed to choose the space.

` + prefixHelp,
		Example: "  lookaside lookup --prompt 'You are …' --vllm http://localhost:8000",
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := c.load(cmd); err != nil {
				return err
			}
			if file != "" {
				more, err := readWords(file, cmd.InOrStdin())
				if err != nil {
					return err
				}
				args = append(args, more...)
			}
			var err error
			if p.given() {
				args, err = p.asked(cmd, &c, &q, args)
				if err != nil {
					return err
				}
			}
			if q.Hashes, q.DigestBytes, err = admin.ParseHashes(args); err != nil {
				return err
			}
			if q.EngineID == "" {
				if _, err = chooseEngine(cmd, &c, &q); err != nil {
					return err
				}
			}
			answer, err := admin.Ask(cmd.Context(), c.cfg.Runtime.Dir, q)
			if err != nil {
				return err
			}
			return c.print(cmd, answer, func(w io.Writer) error {
				_, err := fmt.Fprintf(w, "hit: %d of %d pages, %d tokens, in %s\n", answer.HitPages,
					answer.Pages, answer.HitTokens,
					time.Duration(answer.LatencyUs*float64(time.Microsecond)).Round(
						time.Microsecond))
				return err
			})
		},
	}
	f := cmd.Flags()
	f.StringVar(&q.EngineID, "engine-id", "",
		"engine whose space is meant; may be left out while the workers of only one space are connected")
	f.Uint32Var(&q.Rank, "rank", 0, "rank of the worker that uses the sidecar")
	f.Uint32Var(&q.FirstPage, "first-page", 0,
		"index in its prefix of the first page that is asked for; page hashes are given from it on")
	f.StringVar(&file, "hashes", "", "`file` with page hashes")
	p.flags(cmd)
	f.DurationVar(&q.Timeout, "timeout", 2*time.Second,
		"how long to wait for the handshake, and for the answer")
	c.localFlags(cmd)
	return cmd
}

func printJSON(w io.Writer, v any) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}

// readWords reads words separated by white space from a file, or from standard input for "-".
func readWords(file string, stdin io.Reader) ([]string, error) {
	b, err := readInput(file, stdin)
	return strings.Fields(string(b)), err
}

// readInput reads a file, or standard input for "-".
func readInput(file string, stdin io.Reader) ([]byte, error) {
	r := stdin
	if file != "-" {
		f, err := os.Open(file)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		r = f
	}
	b, err := io.ReadAll(io.LimitReader(r, maxInputFile+1))
	if err != nil {
		return nil, err
	}
	if len(b) > maxInputFile {
		return nil, fmt.Errorf("%s is larger than %d bytes", file, maxInputFile)
	}
	return b, nil
}

// maxInputFile bounds a file of page hashes, tokens or messages.
const maxInputFile = 64 << 20
