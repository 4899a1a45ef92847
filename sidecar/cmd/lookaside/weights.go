package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"lookaside/sidecar/admin"
)

func newWeights() *cobra.Command {
	var (
		c      control
		engine string
		all    bool
	)
	cmd := &cobra.Command{
		Use:   "weights [NAME]",
		Short: "Show what the weights of the engines are called, or name them",
		Long: `Show which engines are connected, and what their weights are called. With a NAME: tell an engine that
its weights are called so from now on. What is stored is found again by all engines whose weights
have the same name, and by no others. The name '' is that of the weights that the model's path names.

Weights that vLLM changes are normally told apart without this: see docs/connector.md. Name weights
that change in another way, before the engine gets a request for them.`,
		Example: "  lookaside weights\n  lookaside weights step-17\n  lookaside weights --all ''",
		Args:    cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			client, err := c.client(cmd)
			if err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), 5*time.Second)
			defer cancel()
			if len(args) == 0 {
				if all || engine != "" {
					return errors.New("--engine and --all say whose weights to name: give a NAME, too")
				}
				return c.listWeights(ctx, cmd, client)
			}
			var answer admin.NameWeightsResult
			if err := client.Post(ctx, "/v1/weights", admin.NameWeightsRequest{EngineID: engine,
				All: all, Epoch: args[0]}, &answer); err != nil {
				return err
			}
			return c.print(cmd, answer, func(w io.Writer) error {
				_, err := fmt.Fprintf(w, "named %s: the weights of %s\n", epochName(args[0]),
					strings.Join(answer.Engines, ", "))
				return err
			})
		},
	}
	f := cmd.Flags()
	f.StringVar(&engine, "engine", "",
		"vLLM's `engine_id`; may be left out while one engine is connected")
	f.BoolVar(&all, "all", false, "all engines that are connected")
	cmd.MarkFlagsMutuallyExclusive("engine", "all")
	c.flags(cmd)
	return cmd
}

func (c *control) listWeights(ctx context.Context, cmd *cobra.Command, client *admin.Client) error {
	var answer admin.WeightsResult
	if err := client.Get(ctx, "/v1/weights", &answer); err != nil {
		return err
	}
	return c.print(cmd, answer, func(w io.Writer) error {
		tw := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
		fmt.Fprintln(tw, "ENGINE\tWEIGHTS\tRANKS\tSPACES")
		for _, e := range answer.Engines {
			fmt.Fprintf(tw, "%s\t%s\t%s\t%s\n", e.EngineID, epochName(e.Epoch),
				strings.Trim(fmt.Sprint(e.Ranks), "[]"), strings.Join(e.Spaces, " "))
		}
		return tw.Flush()
	})
}

// epochName returns the name of an epoch for people.
func epochName(epoch string) string {
	if epoch == "" {
		return "(as the model names them)"
	}
	return epoch
}
