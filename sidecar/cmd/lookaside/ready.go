package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"lookaside/sidecar/admin"
)

// readyInterval is how long lookaside ready --wait waits before it asks again.
const readyInterval = 50 * time.Millisecond

// readyResult is what lookaside ready --json prints.
type readyResult struct {
	State string `json:"state"` // the text of /readyz or /healthz
}

func newReady() *cobra.Command {
	var (
		c    control
		live bool
		wait time.Duration
	)
	cmd := &cobra.Command{
		Use:   "ready",
		Short: "Say whether a sidecar is ready for clients, by the exit status",
		Long: `Say whether a sidecar is ready for clients: exit status 0 if it is, 1 if it is not or none responds.

It is for the health checks of containers and for scripts, where nothing but this binary may be
installed. It asks what GET /readyz responds, or with --live what GET /healthz does: a sidecar that
drains lives, and is not ready.`,
		Example: `  lookaside ready
  lookaside ready --wait 1m --runtime-dir /run/lookaside/llama-0 && vllm serve …`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if wait < 0 {
				return fmt.Errorf("--wait %s: want a time such as 1m, or 0", wait)
			}
			client, err := c.client(cmd)
			if err != nil {
				return err
			}
			path := "/readyz"
			if live {
				path = "/healthz"
			}
			text, err := waitReady(cmd.Context(), client, path, wait)
			if err != nil {
				return err
			}
			return c.print(cmd, readyResult{text}, func(w io.Writer) error {
				_, err := fmt.Fprintln(w, text)
				return err
			})
		},
	}
	cmd.Flags().BoolVar(&live, "live", false, "ask only whether it lives")
	cmd.Flags().DurationVar(&wait, "wait", 0, "how long to wait for it")
	c.flags(cmd)
	return cmd
}

// waitReady asks until the sidecar is ready or the time has passed. It asks at least once.
func waitReady(ctx context.Context, client *admin.Client, path string, wait time.Duration) (string,
	error) {
	end := time.Now().Add(wait)
	for {
		asked, cancel := context.WithTimeout(ctx, 5*time.Second)
		text, err := client.Probe(asked, path)
		cancel()
		if err == nil || time.Until(end) < readyInterval {
			return text, err
		}
		select {
		case <-ctx.Done():
			return "", errors.Join(ctx.Err(), err)
		case <-time.After(readyInterval):
		}
	}
}
