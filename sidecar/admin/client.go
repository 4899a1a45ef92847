package admin

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"syscall"
)

// maxAnswerBytes bounds a response that a command reads.
const maxAnswerBytes = 64 << 20

// A Client sends requests to the sidecar that owns an endpoint, over its admin socket, which needs
// no token.
type Client struct {
	dir  string
	http *http.Client
}

// NewClient returns a client of the sidecar that owns the endpoint dir. It connects for each
// request.
func NewClient(dir string) *Client {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", filepath.Join(dir, socketFile))
	}
	return &Client{dir: dir, http: &http.Client{Transport: &http.Transport{DisableKeepAlives: true,
		DialContext: dial}}}
}

// Get fetches a path into out.
func (c *Client) Get(ctx context.Context, path string, out any) error {
	return c.do(ctx, http.MethodGet, path, nil, out)
}

// Post sends in to a path and reads the response into out.
func (c *Client) Post(ctx context.Context, path string, in, out any) error {
	b, err := json.Marshal(in)
	if err != nil {
		return err
	}
	return c.do(ctx, http.MethodPost, path, b, out)
}

func (c *Client) do(ctx context.Context, method, path string, body []byte, out any) error {
	req, err := http.NewRequestWithContext(ctx, method, "http://localhost"+path,
		bytes.NewReader(body))
	if err != nil {
		return err
	}
	if method == http.MethodPost {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return c.unreached(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return c.refused(path, resp)
	}
	answer := json.NewDecoder(io.LimitReader(resp.Body, maxAnswerBytes))
	if err := answer.Decode(out); err != nil {
		return fmt.Errorf("%s: %s: %w", c.dir, path, err)
	}
	return nil
}

// refused returns the error that a response describes.
func (c *Client) refused(path string, resp *http.Response) error {
	var e APIError
	if json.NewDecoder(io.LimitReader(resp.Body, maxAnswerBytes)).Decode(&e) != nil ||
		e.Message == "" {
		return fmt.Errorf("%s: %s: %s", c.dir, path, resp.Status)
	}
	return fmt.Errorf("%s (%s): %s", e.Message, resp.Status, e.Fix)
}

// An unreachedError describes a cause. Its text replaces that of the cause.
type unreachedError struct {
	text  string
	cause error
}

func (e *unreachedError) Error() string { return e.text }
func (e *unreachedError) Unwrap() error { return e.cause }

// unreached returns why the sidecar did not respond.
func (c *Client) unreached(err error) error {
	var wrapped *url.Error
	if errors.As(err, &wrapped) {
		err = wrapped.Err // drops a URL that the user did not give
	}
	switch {
	case errors.Is(err, os.ErrNotExist):
		return &unreachedError{fmt.Sprintf(
			"no sidecar runs at %s (it has no %s); lookaside list shows those of this host", c.dir,
			socketFile), err}
	case errors.Is(err, syscall.ECONNREFUSED):
		return &unreachedError{fmt.Sprintf(
			"no sidecar runs at %s: the last one was killed; lookaside list shows those of this host", c.dir), err}
	case errors.Is(err, os.ErrPermission):
		return &unreachedError{fmt.Sprintf(
			"the sidecar at %s is another user's: run the command as that user or as root", c.dir),
			err}
	}
	return fmt.Errorf("no sidecar answers at %s: %w", c.dir, err)
}

// FetchStatus returns the status of the sidecar that owns the endpoint dir.
func FetchStatus(ctx context.Context, dir string) (Status, error) {
	var st Status
	return st, NewClient(dir).Get(ctx, "/v1/status", &st)
}
