package sidecar

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
)

// maxAnswerBytes bounds what a command takes for an answer.
const maxAnswerBytes = 64 << 20

// A Client asks the sidecar that owns an endpoint over its admin server.
type Client struct {
	dir, addr, token string
}

// NewClient finds the admin server of the sidecar that owns the endpoint dir. tokenFile may be empty.
func NewClient(dir, tokenFile string) (*Client, error) {
	addr, err := os.ReadFile(filepath.Join(dir, adminAddrFile))
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("no sidecar runs at %s (it has no %s)", dir, adminAddrFile)
	}
	if err != nil {
		return nil, err
	}
	c := &Client{dir: dir, addr: strings.TrimSpace(string(addr))}
	if tokenFile != "" {
		b, err := os.ReadFile(tokenFile)
		if err != nil {
			return nil, fmt.Errorf("admin.token_file: %w", err)
		}
		c.token = strings.TrimSpace(string(b))
	}
	return c, nil
}

// Get fetches a path into out.
func (c *Client) Get(ctx context.Context, path string, out any) error {
	return c.do(ctx, http.MethodGet, path, nil, out)
}

// Post sends in to a path, and reads the answer into out.
func (c *Client) Post(ctx context.Context, path string, in, out any) error {
	b, err := json.Marshal(in)
	if err != nil {
		return err
	}
	return c.do(ctx, http.MethodPost, path, b, out)
}

func (c *Client) do(ctx context.Context, method, path string, body []byte, out any) error {
	req, err := http.NewRequestWithContext(ctx, method, "http://"+c.addr+path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	if method == http.MethodPost {
		req.Header.Set("Content-Type", "application/json")
	}
	if c.token != "" {
		req.Header.Set("Authorization", "Bearer "+c.token)
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		return fmt.Errorf("no sidecar answers at %s: %w", c.dir, err)
	}
	defer resp.Body.Close()
	answer := json.NewDecoder(io.LimitReader(resp.Body, maxAnswerBytes))
	if resp.StatusCode != http.StatusOK {
		var e APIError
		if answer.Decode(&e) != nil || e.Message == "" {
			return fmt.Errorf("%s: %s", req.URL, resp.Status)
		}
		return fmt.Errorf("%s (%s): %s", e.Message, resp.Status, e.Fix)
	}
	if err := answer.Decode(out); err != nil {
		return fmt.Errorf("%s: %w", req.URL, err)
	}
	return nil
}

// FetchStatus asks the sidecar that owns the endpoint dir for its status. tokenFile may be empty.
func FetchStatus(ctx context.Context, dir, tokenFile string) (Status, error) {
	var st Status
	c, err := NewClient(dir, tokenFile)
	if err != nil {
		return st, err
	}
	return st, c.Get(ctx, "/v1/status", &st)
}
