package admin

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"sync"
	"time"

	"lookaside/internal/demand"
)

// RecordingHeader has the number of a recording, by which it is stopped.
const RecordingHeader = "Lookaside-Recording"

// recordings are those that are under way, by number.
type recordings struct {
	mu   sync.Mutex
	next int
	all  map[int]*demand.Recording
}

func (r *recordings) add(rec *demand.Recording) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.all == nil {
		r.all = map[int]*demand.Recording{}
	}
	r.next++
	r.all[r.next] = rec
	return r.next
}

func (r *recordings) remove(number int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.all, number)
}

// StopRecordingRequest names a recording.
type StopRecordingRequest struct {
	Recording int `json:"recording" doc:"The number in the header Lookaside-Recording of the response that it is sent in."`
}

// StopRecordingResult is empty.
type StopRecordingResult struct{}

// StopRecording ends a recording: its response ends after what came until now.
func (o *Operations) StopRecording(_ context.Context, in StopRecordingRequest) (StopRecordingResult,
	error) {
	o.recordings.mu.Lock()
	defer o.recordings.mu.Unlock()
	rec := o.recordings.all[in.Recording]
	if rec == nil {
		return StopRecordingResult{}, apiError(http.StatusNotFound, "it has ended already",
			"there is no recording %d", in.Recording)
	}
	rec.Stop()
	return StopRecordingResult{}, nil
}

// record serves a recording until it is stopped or its reader leaves.
func (o *Operations) record(w http.ResponseWriter, r *http.Request) {
	rec, err := o.Demand.Record()
	switch {
	case errors.Is(err, demand.ErrTooMany):
		apiError(http.StatusServiceUnavailable, "end one of them", "%d recordings are under way",
			demand.MaxRecordings).write(w)
		return
	case err != nil:
		apiError(http.StatusServiceUnavailable, "ask its successor", "%v", err).write(w)
		return
	}
	defer rec.Abandon()
	defer context.AfterFunc(r.Context(), rec.Abandon)()
	number := o.recordings.add(rec)
	defer o.recordings.remove(number)
	rc := http.NewResponseController(w)
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set(RecordingHeader, strconv.Itoa(number))
	_ = rc.SetReadDeadline(time.Time{}) // only a test's writer has no deadlines
	buf := make([]byte, 256<<10)
	for {
		n, err := rec.Read(buf)
		_ = rc.SetWriteDeadline(time.Now().Add(answerTimeout))
		if n > 0 {
			if _, err := w.Write(buf[:n]); err != nil {
				return // the reader has left
			}
			if rc.Flush() != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// Record begins a recording, and returns its stream and its number. The stream ends after
// StopRecording, or when the sidecar ends. ctx bounds all of it.
func (c *Client) Record(ctx context.Context) (io.ReadCloser, int, error) {
	resp, err := c.send(ctx, http.MethodGet, "/v1/record", nil)
	if err != nil {
		return nil, 0, err
	}
	number, err := strconv.Atoi(resp.Header.Get(RecordingHeader))
	if err != nil {
		resp.Body.Close()
		return nil, 0, fmt.Errorf("%s: the response has no header %s", c.name, RecordingHeader)
	}
	return resp.Body, number, nil
}
