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
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show what a running sidecar holds and who uses it",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := sidecar.Load(cmd.Flags(), os.Environ())
			if err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), 5*time.Second)
			defer cancel()
			st, err := sidecar.FetchStatus(ctx, cfg.Runtime.Dir, cfg.Admin.TokenFile)
			if err != nil {
				return err
			}
			if asJSON {
				return printJSON(cmd.OutOrStdout(), st)
			}
			return st.WriteTable(cmd.OutOrStdout())
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	sidecar.AddFlags(cmd.Flags(), "runtime.dir", "admin.token_file")
	return cmd
}

func newLookup() *cobra.Command {
	var (
		asJSON bool
		q      sidecar.Query
		file   string
	)
	cmd := &cobra.Command{
		Use:   "lookup --engine-id ID [HASH …]",
		Short: "Ask a running sidecar how much of a prefix it holds, as a scheduler would",
		Long: `Ask a running sidecar how much of a prefix it holds, over its real sockets, as a scheduler of the engine would.

Page hashes are given in hexadecimal, in the order of the prefix, as arguments or in a file (--hashes; "-" is standard
input), separated by white space. A worker of the engine must be connected: it is what says which space is meant.`,
		RunE: func(cmd *cobra.Command, args []string) error {
			cfg, err := sidecar.Load(cmd.Flags(), os.Environ())
			if err != nil {
				return err
			}
			if file != "" {
				more, err := readWords(file, cmd.InOrStdin())
				if err != nil {
					return err
				}
				args = append(args, more...)
			}
			if q.Hashes, q.DigestBytes, err = sidecar.ParseHashes(args); err != nil {
				return err
			}
			answer, err := sidecar.Ask(cmd.Context(), cfg.Runtime.Dir, q)
			if err != nil {
				return err
			}
			if asJSON {
				return printJSON(cmd.OutOrStdout(), answer)
			}
			fmt.Fprintf(cmd.OutOrStdout(), "hit: %d of %d pages, %d tokens, in %s\n", answer.HitPages, answer.Pages, answer.HitTokens,
				time.Duration(answer.LatencyUs*float64(time.Microsecond)).Round(time.Microsecond))
			return nil
		},
	}
	f := cmd.Flags()
	f.BoolVar(&asJSON, "json", false, "print JSON")
	f.StringVar(&q.EngineID, "engine-id", "", "engine whose space is meant (required)")
	f.Uint32Var(&q.Rank, "rank", 0, "rank of the worker that uses the sidecar")
	f.Uint32Var(&q.FirstPage, "first-page", 0, "index in its prefix of the first page that is asked for")
	f.StringVar(&file, "hashes", "", "`file` with page hashes")
	f.DurationVar(&q.Timeout, "timeout", 2*time.Second, "how long to wait for the handshake, and for the answer")
	sidecar.AddFlags(f, "runtime.dir")
	_ = cmd.MarkFlagRequired("engine-id")
	return cmd
}

func printJSON(w io.Writer, v any) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}

// readWords reads words separated by white space from a file, or from standard input for "-".
func readWords(file string, stdin io.Reader) ([]string, error) {
	r := stdin
	if file != "-" {
		f, err := os.Open(file)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		r = f
	}
	b, err := io.ReadAll(io.LimitReader(r, maxHashFile+1))
	if err != nil {
		return nil, err
	}
	if len(b) > maxHashFile {
		return nil, fmt.Errorf("%s is larger than %d bytes", file, maxHashFile)
	}
	return strings.Fields(string(b)), nil
}

// maxHashFile bounds a file of page hashes.
const maxHashFile = 64 << 20
