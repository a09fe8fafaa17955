package puller

// State is how an image stands at the end of a cycle.
type State string

// The states of an image.
const (
	Present State = "present"
	Failed  State = "failed"
	Skipped State = "skipped"
)

// Action is what was done for an image.
type Action string

// The actions on an image.
const (
	Pulled Action = "pulled"
	None   Action = "none"
)

// Result is the outcome for one image, in the form of kip's JSON output.
type Result struct {
	// Image is the reference as its source named it, Source that source.
	Image  string `json:"image"`
	Source string `json:"source"`
	// Ref is the normalised reference, empty where Image is none.
	Ref     string `json:"ref"`
	State   State  `json:"state"`
	Action  Action `json:"action"`
	Reason  Reason `json:"reason"`
	Message string `json:"message"`
	// Digest is the target of the record: an index or a manifest. ID is the digest
	// of the configuration.
	Digest string `json:"digest"`
	ID     string `json:"id"`
	// Credential is SECRET/KEY or anonymous: the one that worked, or the last one
	// tried. It is empty where no registry was asked.
	Credential string `json:"credential"`
	// Attempts counts pulls, Bytes what came over the network, Seconds the time.
	Attempts int     `json:"attempts"`
	Bytes    int64   `json:"bytes"`
	Seconds  float64 `json:"seconds"`
	Pinned   bool    `json:"pinned"`
	// Names are the records of the image: tag, digest and ID.
	Names []string `json:"names"`
	// Warnings are about the credentials that were refused before one worked. They
	// go with those of the whole report.
	Warnings []string `json:"-"`
}
